// Elements without a framework. Text is always set as text: what is in a bucket is never markup.

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function say(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

// A time gone by that goes on by itself; `shift` is the server's clock minus ours.
export const clock = { shift: 0, now: () => Date.now() / 1000 + clock.shift };
export const since = (time, before = "", after = "") =>
  element("span", { "data-since": time, "data-before": before, "data-after": after });
