// The fleet and the newest versions as tables; on a phone every row is a card.

import { byId, clock, element, since } from "./dom.js";
import { age, duration, number, percent, size, steps } from "./format.js";

const FEW = 12;
export const HEALTH = {
  poisoned: ["✕", "poisoned", "its memory failed the audit"],
  refused: ["✕", "refused", "would not take a version, serves an older one"],
  astray: ["?", "astray", "serves a version that is none of this run's"],
  behind: ["▾", "behind", "serves an older version"],
  starting: ["…", "starting", "serves no version yet"],
  current: ["✓", "current", "serves the newest version"],
};
let all = false;

export function fleet({ rows, count, counts }) {
  byId("health").replaceChildren(...Object.entries(counts).map(([name, n]) => share(name, n)));
  if (!count) return byId("fleet").replaceChildren(none());
  const shown = all ? rows : rows.slice(0, FEW);
  const timed = rows.some((row) => Object.keys(row.performance).length);
  const head = ["replica", "health", "#version", "#behind", "#heard", ...(timed ? ["#served after", "#token gap"] : [])];
  const body = shown.flatMap((row) => replica(row, timed, head.length));
  const parts = [table(head, body)];
  if (rows.length > FEW) {
    const toggle = element("button", { type: "button" }, all ? `Show ${FEW}` : `Show all ${number(rows.length)}`);
    toggle.addEventListener("click", () => ((all = !all), fleet({ rows, count, counts })));
    parts.push(toggle);
  }
  if (count > rows.length) parts.push(element("p", { class: "small" }, `${number(count - rows.length)} more are not listed.`));
  byId("fleet").replaceChildren(...parts);
}

function share(name, count) {
  const [sign, word, means] = HEALTH[name];
  const part = element("span", { class: name, title: means }, `${sign} ${number(count)} ${word}`);
  part.style.flexGrow = count;
  return part;
}

function none() {
  return element("p", { class: "empty" }, "No replica has acknowledged a version. A server does once it runs with ",
    element("code", {}, "--delta-sync URI"), "; if its acknowledgements lie elsewhere, name that place with ",
    element("code", {}, "--ack-uri"), ".");
}

function replica(row, timed, columns) {
  const [sign, word, means] = HEALTH[row.health];
  const wrong = trouble(row);
  const cells = [
    cell("", "mono", row.replica),
    cell("", `health ${row.health}`, element("span", { title: means }, `${sign} ${word}`)),
    cell("version", "number", row.version === null ? "–" : number(row.version)),
    cell("behind", "number", ...lag(row)),
    cell("heard", "number", since(row.time, "", " ago")),
  ];
  if (timed) {
    cells.push(cell("served after", "number", duration(row.performance.served_seconds)));
    cells.push(cell("token gap", "number", duration(row.performance.gap_seconds)));
  }
  const first = element("tr", wrong ? { class: "has-error" } : {}, ...cells);
  return wrong ? [first, element("tr", { class: "error" }, element("td", { colspan: columns }, wrong))] : [first];
}

function lag(row) {
  if (row.lag === null) return ["–"];
  if (!row.lag) return ["0"];
  return [number(row.lag), ...(row.behind_since ? [element("span", { class: "unit" }, since(row.behind_since, " for "))] : [])];
}

function trouble(row) {
  if (row.error === null) return row.health === "astray" ? "serves a version that is none of this chain's" : null;
  return `${row.refused_version ? `refused ${number(row.refused_version)}: ` : ""}${row.error}`;
}

export function newest({ rows }) {
  if (!rows.length) return byId("newest").replaceChildren(element("p", { class: "empty" }, "None yet."));
  const signed = rows.some((row) => row.signed_by);
  const head = ["#version", "kind", "#step", "#age", "#changed", "#bytes", "anchor", "parent", ...(signed ? ["signed by"] : [])];
  byId("newest").replaceChildren(table(head, rows.map((row) => version(row, signed))));
}

function version(row, signed) {
  const origin = row.kind === "origin";
  const cells = [
    cell("version", "number", number(row.version)),
    cell("kind", "", row.kind),
    cell("step", "number", steps(row.steps)),
    cell("age", "number", since(row.created_at)),
    cell("changed", "number", origin ? "–" : percent(row.changed_elements / Math.max(1, row.total_elements))),
    cell("bytes", "number", origin ? "–" : size(row.bytes)),
    cell("anchor", row.anchor ? (row.anchor.error ? "refused" : "") : "empty-cell", anchor(row.anchor)),
    cell("parent", "mono", row.parent ? row.parent.slice(0, 8) : "–"),
  ];
  if (signed) cells.push(cell("signed by", "mono", row.signed_by ?? "–"));
  return element("tr", {}, ...cells);
}

const anchor = (found) => (found === null ? "–" : found.error ? "✕ damaged" : `▲ ${size(found.bytes)}`);

const cell = (name, kind, ...content) => element("td", { class: kind || null, "data-name": name || null }, ...content);

// Columns whose name begins with # are numbers.
function table(head, rows) {
  const names = head.map((name) =>
    element("th", { scope: "col", class: name.startsWith("#") ? "number" : null }, name.replace("#", "")));
  return element("div", { class: "scroll" },
    element("table", {}, element("thead", {}, element("tr", {}, ...names)), element("tbody", {}, ...rows)));
}

export function tick() {
  for (const node of document.querySelectorAll("[data-since]")) {
    const { since: from, before, after } = node.dataset;
    const text = `${before}${age(clock.now() - Number(from))}${after}`;
    if (node.textContent !== text) node.textContent = text;
  }
}
