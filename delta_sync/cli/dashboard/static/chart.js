// Charts above one another with one x axis, one crosshair and one line that reads out what is under it.

import { element, svg } from "./dom.js";

const LEFT = 62, RIGHT = 8, TITLE = 27, GAP = 12, AXIS = 20;

// Draws into `place`, again whenever its width changes. `make()` gives
// { count, label(i), describe(i), summary, panels: [{ name, height, format, base, series, marks, epochs }] } or null.
export class Chart {
  constructor(place) {
    this.place = place;
    this.at = null; // the point that is read out; null is the last one
    this.data = null;
    this.readout = element("p", { class: "readout" });
    this.drawing = element("div");
    place.append(this.readout, this.drawing);
    new ResizeObserver(() => this.draw()).observe(this.drawing);
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const { data } = this;
    const width = this.drawing.clientWidth;
    this.place.hidden = data === null;
    if (data === null || width < 50) return;
    const height = data.panels.reduce((sum, panel) => sum + TITLE + panel.height + GAP + (panel.below ?? 0), AXIS);
    const focused = document.activeElement === this.root;
    this.root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img", "aria-label": data.summary });
    this.slot = (width - LEFT - RIGHT) / data.count;
    let top = 0;
    for (const panel of data.panels) {
      this.root.append(...this.panel(panel, top + TITLE, width));
      top += TITLE + panel.height + GAP + (panel.below ?? 0);
    }
    this.root.append(...this.axis(top, width));
    this.cross = svg("line", { class: "cross", y1: TITLE, y2: top - GAP });
    this.root.append(this.cross);
    this.drawing.replaceChildren(this.root);
    this.listen();
    if (focused) this.root.focus();
    this.read();
  }

  x(index) {
    return LEFT + (index + 0.5) * this.slot;
  }

  panel({ name, height, format, base, series, marks, epochs }, top, width) {
    const values = series.flatMap((one) => [...one.values, ...(one.most ?? [])]).filter((value) => value !== null);
    const [low, high, ticks] = scale(values, base);
    const y = (value) => top + height - ((value - low) / (high - low)) * height;
    const parts = [svg("text", { class: "name", x: 0, y: top - 12 }, name)];
    for (const tick of ticks) {
      const at = Math.round(y(tick)) + 0.5;
      parts.push(svg("line", { class: tick === low ? "base" : "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      parts.push(svg("text", { x: LEFT - 8, y: at + 3.5, "text-anchor": "end" }, format(tick).replace(/\.0+(?=\D|$)/, "")));
    }
    for (const one of series) parts.push(...this.series(one, y, low));
    if (marks) parts.push(...this.marks(marks, top + height));
    let before = -Infinity;
    for (const { index, text } of epochs ?? []) {
      const x = Math.round(LEFT + index * this.slot) + 0.5;
      parts.push(svg("line", { class: "epoch", x1: x, x2: x, y1: top - 8, y2: top + height }));
      const room = x + 62 < width;
      if (x - before > 70) parts.push(svg("text", { class: "epoch-name", x: x + (room ? 4 : -4), y: top - 12, "text-anchor": room ? "start" : "end" }, text));
      before = x - before > 70 ? x : before;
    }
    return parts;
  }

  series({ values, most, shape, kind = "" }, y, low) {
    const differ = most && most.some((value, index) => value !== values[index]);
    const draw = shape === "bars" ? (v, c) => this.bars(v, y, low, c) : (v, c) => this.line(v, y, c);
    return [...(differ ? draw(most, `most ${kind}`) : []), ...draw(values, kind)];
  }

  bars(values, y, low, kind) {
    const wide = Math.max(0.6, this.slot > 4 ? this.slot - Math.min(3, this.slot / 4) : this.slot);
    const path = values.map((value, index) => {
      if (value === null) return "";
      const x = this.x(index) - wide / 2, top = Math.min(y(value), y(low) - (value > 0 ? 1 : 0));
      return `M${x.toFixed(1)} ${y(low).toFixed(1)}V${top.toFixed(1)}h${wide.toFixed(1)}V${y(low).toFixed(1)}Z`;
    });
    return [svg("path", { class: `bars ${kind}`, d: path.join("") })];
  }

  line(values, y, kind) {
    let pen = "M";
    const parts = [], dots = [];
    values.forEach((value, index) => {
      if (value === null) return void (pen = "M");
      parts.push(`${pen}${this.x(index).toFixed(1)} ${y(value).toFixed(1)}`);
      const alone = pen === "M" && (values[index + 1] ?? null) === null;
      if (alone) dots.push(svg("circle", { class: `dot ${kind}`, cx: this.x(index), cy: y(value), r: 2.5 }));
      pen = "L";
    });
    return [svg("path", { class: `line ${kind}`, d: parts.join("") }), ...dots];
  }

  // Triangles and rings under the axis, thinned out where they would touch.
  marks(marks, top) {
    const parts = [];
    for (const { counts, shape } of marks) {
      let before = -Infinity;
      counts.forEach((count, index) => {
        const x = this.x(index);
        if (!count || x - before < 9) return;
        before = x;
        if (shape === "anchor") parts.push(svg("path", { class: "anchor", d: `M${x} ${top + 2}l4.5 8h-9Z` }));
        else parts.push(svg("circle", { class: "fold", cx: x, cy: top + 16, r: 3 }));
      });
    }
    return parts;
  }

  axis(top, width) {
    const { count, label } = this.data;
    const most = Math.max(2, Math.min(count, Math.floor((width - LEFT) / 110)));
    const places = count === 1 ? [0] : Array.from({ length: most }, (_, k) => Math.round((k * (count - 1)) / (most - 1)));
    return [...new Set(places)].map((index) => {
      const x = this.x(index), anchor = count > 1 && index === 0 ? "start" : index === count - 1 && count > 1 ? "end" : "middle";
      const shift = anchor === "start" ? -this.slot / 2 : anchor === "end" ? this.slot / 2 : 0;
      return svg("text", { x: x + shift, y: top + 8, "text-anchor": anchor }, label(index));
    });
  }

  listen() {
    const { root } = this;
    const point = (event) => {
      const x = event.clientX - root.getBoundingClientRect().left;
      this.read(Math.min(this.data.count - 1, Math.max(0, Math.floor((x - LEFT) / this.slot))));
    };
    root.addEventListener("pointermove", point);
    root.addEventListener("pointerdown", point);
    root.addEventListener("pointerleave", () => this.read(null));
    root.addEventListener("keydown", (event) => {
      const last = this.data.count - 1, at = this.at ?? last;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.readout.setAttribute("aria-live", "polite");
      this.read(Math.min(last, Math.max(0, to)));
    });
  }

  read(at = this.at) {
    this.at = at !== null && at >= this.data.count ? null : at;
    const index = this.at ?? this.data.count - 1;
    this.cross.setAttribute("x1", this.x(index));
    this.cross.setAttribute("x2", this.x(index));
    this.cross.style.visibility = this.at === null ? "hidden" : "visible";
    this.readout.replaceChildren(this.data.describe(index));
  }
}

// Lowest, highest and the lines to draw; `base` 1024 keeps bytes on round units. From 0 unless there is less.
function scale(values, base = 10) {
  const most = Math.max(...values, 0), least = Math.min(...values, 0);
  const span = most - least || 1;
  const unit = base === 1024 ? 1024 ** Math.max(0, Math.floor(Math.log(span) / Math.log(1024))) : 1;
  const rough = span / unit / 3, power = 10 ** Math.floor(Math.log10(rough));
  const step = unit * power * [1, 2, 2.5, 5, 10].find((nice) => nice * power >= rough);
  const low = Math.floor(least / step) * step, ticks = [low];
  while (ticks[ticks.length - 1] < most - step * 1e-9) ticks.push(ticks[ticks.length - 1] + step);
  if (ticks.length === 1) ticks.push(low + step);
  return [low, ticks[ticks.length - 1], ticks];
}
