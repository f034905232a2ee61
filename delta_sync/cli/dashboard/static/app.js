// One stream of events in, one page out. Every part of the page is drawn again when its event comes.

import { Chart } from "./chart.js";
import { byId, clock, element, say, since } from "./dom.js";
import { duration, number, percent, plain, short, size, steps } from "./format.js";
import { Heat } from "./heat.js";
import { fleet, HEALTH, newest, tick } from "./tables.js";

const timeline = new Chart(byId("timeline"));
const commits = new Chart(byId("commits"));
const heat = new Heat(byId("heat"));
const known = {}; // what came last, by name of the part
let stream = null;

const parts = { run, versions, newest, replicas, heat: map, commits: times };

function listen() {
  stream?.close();
  stream = new EventSource(`api/events?last=${byId("window").value}`);
  for (const [name, draw] of Object.entries(parts)) {
    stream.addEventListener(name, (event) => {
      known[name] = JSON.parse(event.data);
      draw(known[name]);
      tick();
    });
  }
  stream.addEventListener("now", (event) => {
    clock.shift = Number(event.data) - Date.now() / 1000;
    link("live", "live");
    document.documentElement.dataset.ready = "yes";
    tick();
  });
  stream.addEventListener("error", () => {
    link("lost", "no answer, trying again");
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 2000); // it was refused, not cut
  });
}

function link(state, text) {
  byId("link").dataset.state = state;
  say("link", text);
}

function run({ uri, newest, held, oldest, complete, looked, problems, ends, chain }) {
  say("uri", uri);
  document.title = newest ? `${number(newest.version)} · ${uri.split("/").pop() || uri} · delta-sync` : "delta-sync";
  byId("problems").hidden = !problems.length;
  byId("problems").replaceChildren(...problems.map((text) => element("p", {}, `✕ ${text}`)));
  if (!newest) {
    say("fact-version", "none");
    say("fact-version-more", looked ? "a trainer's first publish makes one" : "reading the run");
    return;
  }
  say("fact-version", number(newest.version));
  byId("fact-version-more").replaceChildren(since(newest.created_at, `step ${steps(newest.steps)} · epoch ${newest.epoch} · `, " ago"));
  const origin = newest.kind === "origin";
  say("fact-changed", origin ? "–" : percent(newest.changed_elements / Math.max(1, newest.total_elements)));
  say("fact-changed-more", origin ? `an origin of ${short(newest.total_elements)} elements` :
    `${short(newest.changed_elements)} of ${short(newest.total_elements)} elements · ${size(newest.bytes)}`);
  say("fact-chain", chain ? size(chain.anchor_bytes + chain.bytes) : "–");
  say("fact-chain-more", chain ? joining(chain) : complete ? "there is no anchor" : "looking for an anchor");
  const range = `versions ${number(oldest)} to ${number(newest.version)}`;
  say("timeline-note", complete ? (ends ? `Nothing is left before version ${number(oldest)}.` : "") : `Read so far: ${range}, ${number(held)} in all.`);
}

const joining = ({ anchor, deltas }) =>
  `the anchor of version ${number(anchor)}${deltas ? ` and ${number(deltas)} delta${deltas > 1 ? "s" : ""}` : ""}`;

function replicas(part) {
  fleet(part);
  const { rows, count, counts } = part;
  say("fact-fleet", count ? `${number(counts.current ?? 0)} of ${number(count)}` : "none");
  const worst = Math.max(0, ...rows.map((row) => row.lag ?? 0));
  const bad = ["poisoned", "refused", "astray"].filter((name) => counts[name]);
  const told = bad.map((name) => `${counts[name]} ${HEALTH[name][1]}`);
  if (worst) told.push(`worst lag ${number(worst)}`);
  say("fact-fleet-more", count ? ["serve the newest", ...told].join(" · ") : "no replica yet");
}

function versions(part) {
  const count = part.first.length;
  byId("timeline-key").replaceChildren(...keys(part).map((text) => element("span", {}, text)));
  if (!count) {
    timeline.show(null);
    say("timeline-note", "No version yet. A trainer's first publish makes one.");
    return;
  }
  const panels = [
    {
      name: "Bytes a version", height: 96, format: size, base: 1024,
      series: [{ values: part.bytes, most: part.bytes_max, shape: "bars" }],
      marks: [{ counts: part.anchors, shape: "anchor" }, { counts: part.folds, shape: "fold" }],
      epochs: part.epochs.map(({ version, epoch }) => ({ index: part.last.findIndex((last) => last >= version), text: `epoch ${epoch}` })),
    },
    { name: "Elements changed", height: 76, format: percent, series: [{ values: part.changed, most: part.changed_max }] },
  ];
  if (part.anchors.some(Boolean) || part.folds.some(Boolean)) panels[0].below = 12;
  if (part.reward.some((value) => value !== null)) {
    panels.push({ name: "Reward", height: 76, format: plain, series: [{ values: part.reward, kind: "second" }] });
  }
  timeline.show({
    count, panels,
    summary: `Bytes, share of elements changed${panels.length > 2 ? " and reward" : ""} of versions ${part.first[0]} to ${part.last[count - 1]}`,
    label: (index) => number(index === 0 ? part.first[0] : part.last[index]),
    describe: (index) => about(part, index),
  });
}

function keys({ step, anchors, folds, epochs }) {
  const sum = (counts) => number(counts.reduce((a, b) => a + b, 0));
  return [
    step > 1 ? `each point: ${number(step)} versions, their mean strong, their most faint` : null,
    anchors.some(Boolean) ? `▲ anchor (${sum(anchors)})` : null,
    folds.some(Boolean) ? `○ fold (${sum(folds)})` : null,
    epochs.length ? "┆ another trainer, a new epoch" : null,
  ].filter(Boolean);
}

function about(part, index) {
  const first = part.first[index], last = part.last[index];
  const many = first !== last;
  const words = [
    many ? `versions ${number(first)} to ${number(last)}` : `version ${number(last)}`,
    `step ${number(part.steps[index])}`,
    size(part.bytes[index]) + (many ? ` (most ${size(part.bytes_max[index])})` : ""),
    part.changed[index] === null ? "origin" : `${percent(part.changed[index])} changed`,
    part.reward[index] === null ? null : `reward ${plain(part.reward[index])}`,
    part.anchors[index] ? (many ? `${part.anchors[index]} ▲` : "▲ anchor") : null,
    part.folds[index] ? (many ? `${part.folds[index]} ○` : "○ fold") : null,
  ];
  const text = element("span", {}, words.filter(Boolean).join(" · ") + " · ", since(part.created_at[index], "", " ago"));
  queueMicrotask(tick);
  return text;
}

function map(part) {
  const { names, share, left_out } = part[byId("by").value];
  if (!names.length) {
    heat.show(null);
    say("heat-note", "No delta was read yet.");
    return;
  }
  const { versions, step } = part;
  const column = versions.map((_, c) => c).reverse().find((c) => share.some((row) => row[c] !== null)) ?? 0;
  const order = names.map((name, r) => [name, share[r][column] ?? 0]).sort((a, b) => b[1] - a[1]).slice(0, 3);
  const most = order.filter(([, value]) => value).map(([name, value]) => `${name} ${percent(value)}`).join(", ");
  heat.show({ names, share, versions, summary: `At version ${number(versions[column])} most changed: ${most || "nothing"}` });
  const notes = [
    step > 1 ? `One version in ${number(step)}, and the newest.` : "",
    left_out ? `${number(left_out)} more rows are left out.` : "",
  ];
  say("heat-note", notes.filter(Boolean).join(" "));
}

function times(part) {
  const count = part.version.length;
  const when = new Date(part.since * 1000).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false });
  if (!count) {
    commits.show(null);
    say("commits-note", `No replica has told how long a commit took since this server started at ${when}. Replicas tell only of their last one.`);
    return;
  }
  const panel = (name, key) => ({ name, height: 76, format: duration, series: [{ values: part[key], most: part[`${key}_max`] }] });
  const panels = [["Token gap around the commit", "gap_seconds"], ["From publish to served", "served_seconds"]]
    .filter(([, key]) => part[key].some((value) => value !== null)).map(([name, key]) => panel(name, key));
  commits.show({
    count, panels,
    summary: `Token gap and time to serve of versions ${part.version[0]} to ${part.version[count - 1]}`,
    label: (index) => number(part.version[index]),
    describe: (index) => element("span", {}, `version ${number(part.version[index])} · gap ${both(part, "gap_seconds", index)} · served after ${both(part, "served_seconds", index)}`),
  });
  say("commits-note", `Strong: the median of the replicas, faint: the slowest. Collected since ${when}, when this server started.`);
}

const both = (part, key, index) =>
  part[key][index] === null ? "–" : `${duration(part[key][index])} (slowest ${duration(part[`${key}_max`][index])})`;

byId("window").addEventListener("change", listen);
byId("by").addEventListener("change", () => known.heat && map(known.heat));
setInterval(tick, 1000);
listen();
