// A small line chart of the last minute.

import { el } from "./dom.js";

const SECONDS = 60;
const [WIDTH, HEIGHT] = [240, 56];

export class Chart {
  /** Creates a chart with a title. `format` turns its values into text. */
  constructor(title, format) {
    this.format = format;
    this.points = [];
    this.value = el("span", { class: "value" });
    this.canvas = el("canvas", { width: WIDTH, height: HEIGHT, role: "img", "aria-label": title });
    this.element = el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, title), this.value), this.canvas);
    this.title = title;
  }

  /** Forgets all values. */
  clear() {
    this.points = [];
  }

  /** Adds a value at a time in seconds, and draws the last minute. */
  add(time, value) {
    this.points.push([time, value]);
    while (this.points[0][0] < time - SECONDS) this.points.shift();
    this.draw(time);
  }

  draw(now) {
    const scale = devicePixelRatio || 1;
    const { canvas, points } = this;
    if (canvas.width !== WIDTH * scale) [canvas.width, canvas.height] = [WIDTH * scale, HEIGHT * scale];
    const context = canvas.getContext("2d");
    const most = Math.max(...points.map(([, value]) => value), 1e-9);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, WIDTH, HEIGHT);
    context.beginPath();
    const place = ([time, value]) => [WIDTH * (1 - (now - time) / SECONDS), HEIGHT - 2 - (HEIGHT - 6) * (value / most)];
    points.forEach((point, number) => (number === 0 ? context.moveTo(...place(point)) : context.lineTo(...place(point))));
    context.strokeStyle = getComputedStyle(canvas).color;
    context.lineWidth = 1.5;
    context.stroke();
    const last = this.format(points[points.length - 1][1]);
    this.value.textContent = `${last}, max ${this.format(most)}`;
    canvas.setAttribute("aria-label", `${this.title}: ${this.value.textContent} in the last minute`);
  }
}
