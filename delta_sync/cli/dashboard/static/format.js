// Numbers as people read them; the same words as the command line's.

export const number = (value) => value.toLocaleString("en");

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; bytes >= 1024 && at < units.length - 1; at++) bytes /= 1024;
  return `${at && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[at]}`;
}

export function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  return `${value >= 10 ? value.toFixed(0) : value >= 0.1 ? value.toFixed(2) : value.toPrecision(2)} %`;
}

export function short(count) {
  for (const [unit, length] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (count >= length) return `${(count / length).toPrecision(3)} ${unit}`;
  }
  return String(count);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.1) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : age(seconds);
}

export function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600]]) {
    if (seconds >= length) return `${(seconds / length).toFixed(1)} ${unit}`;
  }
  return seconds >= 60 ? `${Math.floor(seconds / 60)} min` : `${Math.max(0, Math.floor(seconds))} s`;
}

export const plain = (value) => (value === 0 ? "0" : String(Number(value.toPrecision(3))));

export const steps = ([first, last]) => (first === last ? number(last) : `${number(first)}–${number(last)}`);
