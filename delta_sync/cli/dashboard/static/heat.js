// The map of where a model changes: a row a layer, a column a version, darker (or brighter) where more changed.

import { element } from "./dom.js";
import { number, percent } from "./format.js";

const GAP = 8, AXIS = 20, LEGEND = 34;

export class Heat {
  constructor(place) {
    this.place = place;
    this.data = null;
    this.at = null; // [row, column] that is read out
    this.readout = element("p", { class: "readout" });
    this.canvas = element("canvas", { tabindex: 0, role: "img" });
    place.append(this.readout, this.canvas);
    new ResizeObserver(() => this.draw()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.listen();
  }

  // data: { versions, names, share: rows of columns, summary } or null
  show(data) {
    this.data = data;
    if (data && this.at && (this.at[0] >= data.names.length || this.at[1] >= data.versions.length)) this.at = null;
    this.draw();
  }

  draw() {
    const { data, canvas, place } = this;
    place.hidden = data === null;
    const width = place.clientWidth;
    if (data === null || width < 50) return;
    this.row = data.names.length <= 26 ? 17 : data.names.length <= 60 ? 13 : 9;
    const height = data.names.length * this.row + AXIS + LEGEND, ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    canvas.setAttribute("aria-label", data.summary);
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    pen.scale(ratio, ratio);
    pen.font = `${Math.min(12, this.row - 1)}px ${getComputedStyle(place).fontFamily}`;
    pen.textBaseline = "middle";
    const widest = Math.max(...data.names.map((name) => pen.measureText(name).width));
    this.left = Math.ceil(Math.min(widest, width * 0.34)) + GAP;
    this.column = (width - this.left) / data.versions.length;
    this.most = Math.max(...data.share.flat().map((share) => share ?? 0), 1e-9);
    const ramp = [0, 1, 2].map((k) => rgb(color(`--heat-${k}`)));
    this.cells(pen, ramp);
    pen.fillStyle = color("--soft");
    this.names(pen);
    this.axis(pen, width);
    this.legend(pen, ramp, width, height - LEGEND + 14, color("--soft"));
    this.frame(pen, color("--text"));
    this.read();
  }

  cells(pen, ramp) {
    const gap = this.column > 5 ? 1 : 0;
    this.data.share.forEach((row, r) =>
      row.forEach((share, c) => {
        if (share === null) return; // not read, or no delta
        pen.fillStyle = mix(ramp, Math.sqrt(share / this.most));
        pen.fillRect(this.left + c * this.column, r * this.row, Math.max(0.5, this.column - gap) + (gap ? 0 : 0.5), this.row - 1);
      }),
    );
  }

  names(pen) {
    pen.textAlign = "right";
    const every = this.row < 11 ? 2 : 1;
    this.data.names.forEach((name, r) => {
      if (r % every) return;
      let text = name;
      while (text.length > 3 && pen.measureText(text).width > this.left - GAP) text = `…${text.slice(2)}`;
      pen.fillText(text, this.left - GAP, r * this.row + this.row / 2);
    });
  }

  axis(pen, width) {
    const { versions } = this.data, count = versions.length;
    const most = Math.max(2, Math.min(count, Math.floor((width - this.left) / 90)));
    pen.font = `11.5px ${getComputedStyle(this.place).fontFamily}`;
    const y = this.data.names.length * this.row + 11;
    for (let k = 0; k < (count === 1 ? 1 : most); k++) {
      const index = count === 1 ? 0 : Math.round((k * (count - 1)) / (most - 1));
      pen.textAlign = index === 0 ? "left" : index === count - 1 ? "right" : "center";
      const x = index === 0 ? this.left : index === count - 1 ? width : this.left + (index + 0.5) * this.column;
      pen.fillText(number(versions[index]), x, y);
    }
  }

  legend(pen, ramp, width, y, soft) {
    const text = `0 to ${percent(this.most)} changed`;
    const long = Math.min(160, width - this.left - pen.measureText(text).width - 12);
    for (let x = 0; x < long; x++) {
      pen.fillStyle = mix(ramp, x / long);
      pen.fillRect(this.left + x, y, 1.5, 9);
    }
    pen.fillStyle = soft;
    pen.textAlign = "left";
    pen.fillText(text, this.left + long + 8, y + 5);
  }

  frame(pen, color) {
    if (!this.at) return;
    const [r, c] = this.at;
    pen.strokeStyle = color;
    pen.lineWidth = 1.5;
    pen.strokeRect(this.left + c * this.column - 1, r * this.row - 0.5, Math.max(3, this.column) + 1, this.row);
  }

  listen() {
    const { canvas } = this;
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      this.go(Math.floor((event.clientY - box.top) / this.row), Math.floor((event.clientX - box.left - this.left) / this.column));
    };
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerdown", point);
    canvas.addEventListener("pointerleave", () => ((this.at = null), this.draw()));
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!by || !this.data) return;
      event.preventDefault();
      this.readout.setAttribute("aria-live", "polite");
      const [r, c] = this.at ?? [0, this.data.versions.length];
      this.go(r + by[0], c + by[1]);
    });
  }

  go(row, column) {
    if (!this.data) return;
    const within = (value, count) => Math.min(count - 1, Math.max(0, value));
    this.at = [within(row, this.data.names.length), within(column, this.data.versions.length)];
    this.draw();
  }

  read() {
    const { data, at } = this;
    if (!at) return void (this.readout.textContent = data.summary);
    const share = data.share[at[0]][at[1]];
    const said = share === null ? "not known" : `${percent(share)} changed`;
    this.readout.textContent = `${data.names[at[0]]} at version ${number(data.versions[at[1]])}: ${said}`;
  }
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function mix(ramp, t) {
  const at = Math.min(0.9999, Math.max(0, t)) * 2, k = Math.floor(at), part = at - k;
  const [from, to] = [ramp[k], ramp[k + 1]];
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * part)).join(",")})`;
}
