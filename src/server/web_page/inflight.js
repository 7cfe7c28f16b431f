// Requests in flight: every running sequence as a bar in its slot, which grows token by token (after the display of
// Flover: Yao et al. 2023), and the last minute of the engine's numbers.

import { events } from "./api.js";
import { Chart } from "./chart.js";
import { el } from "./dom.js";

/** Height of a slot's row in pixels; style.css has the same. */
const ROW = 18;

/** Seconds after which a lost connection is tried again. */
const RETRY_S = 3;

/** Builds the view, which receives data while it is shown. */
export class InFlight {
  constructor(view) {
    this.numbers = el("dl", { class: "cards", "aria-label": "Numbers" });
    this.card = el("dl", { class: "card", "aria-label": "Model and devices" });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.lanes = el("div", { class: "lanes" });
    this.pause = el("button", { type: "button", class: "quiet", "aria-pressed": "false", click: () => this.togglePause() }, "Pause");
    this.charts = {
      rate: new Chart("Tokens per second", (value) => value.toFixed(0)),
      step: new Chart("Step time in ms", (value) => value.toFixed(1)),
      running: new Chart("Running sequences", (value) => value.toFixed(0)),
      queued: new Chart("Queued sequences", (value) => value.toFixed(0)),
    };
    const charts = Object.values(this.charts).map((chart) => chart.element);
    view.replaceChildren(
      el("div", { class: "row" }, el("h2", {}, "Requests in flight"), this.pause),
      this.error,
      this.numbers,
      el("div", { class: "charts" }, ...charts),
      el("h3", {}, "Slots"),
      el("p", { class: "hint" }, "A bar is a sequence: its prompt, then its generated tokens, of the maximum. Bars slide when the shuffle moves them."),
      this.lanes,
      el("h3", {}, "Model and devices"),
      this.card,
    );
    this.bars = new Map();
  }

  /** Receives data until `stop` is called. */
  async start() {
    if (this.abort) return;
    const abort = (this.abort = new AbortController());
    while (!abort.signal.aborted) {
      try {
        for await (const data of events("v1/inflight", { signal: abort.signal })) {
          this.showError(null);
          if (data.object === "inflight.start") this.begin(data);
          else if (!this.isPaused) this.show(data);
        }
      } catch (error) {
        if (abort.signal.aborted) return;
        this.showError(error.message);
        if ([401, 403, 404].includes(error.status)) {
          this.abort = null;
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_S * 1000));
    }
  }

  /** Ends receiving. */
  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  togglePause() {
    this.isPaused = !this.isPaused;
    this.pause.setAttribute("aria-pressed", String(Boolean(this.isPaused)));
    this.pause.textContent = this.isPaused ? "Continue" : "Pause";
  }

  showError(message) {
    this.error.textContent = message ?? "";
    this.error.hidden = !message;
  }

  begin(start) {
    this.limits = start;
    this.lastSecond = [];
    this.bars.clear();
    // The times of another process begin anew.
    for (const chart of Object.values(this.charts)) chart.clear();
    const lane = ([first, slots], number) => {
      const name = start.lanes.length > 1 ? `Lane ${number + 1}` : "Lane";
      return { first, rows: el("ol", { class: "slots", "aria-label": `${name} of ${slots} slots` }) };
    };
    this.laneViews = start.lanes.map(lane);
    this.lanes.replaceChildren(...this.laneViews.map((view) => view.rows));
    const facts = start.facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
    this.card.replaceChildren(...facts.flat());
  }

  show(frame) {
    if (!this.limits) return;
    const seen = new Set();
    frame.lanes.forEach((lane, number) => this.showLane(number, lane, seen));
    for (const [id, bar] of this.bars) {
      if (!seen.has(id)) {
        bar.row.remove();
        this.bars.delete(id);
      }
    }
    this.showNumbers(frame);
  }

  showLane(number, lane, seen) {
    const { rows, first } = this.laneViews[number];
    const end = lane.sequences.length > 0 ? lane.window[1] : first;
    rows.style.height = `${Math.max(end - first, 1) * ROW}px`;
    for (const [slot, id, prompt, computed, generated, limit] of lane.sequences) {
      const key = `${number}/${id}`;
      seen.add(key);
      let bar = this.bars.get(key);
      if (!bar) {
        bar = newBar(id);
        this.bars.set(key, bar);
        rows.append(bar.row);
      }
      if (bar.slot !== undefined && bar.slot !== slot) {
        showMove(bar.track);
      }
      bar.slot = slot;
      bar.row.style.transform = `translateY(${(slot - first) * ROW}px)`;
      const total = Math.max(prompt + limit, 1);
      bar.prompt.style.width = `${(100 * computed) / total}%`;
      bar.generated.style.width = `${(100 * generated) / total}%`;
      bar.label.textContent = String(slot);
      bar.count.textContent = computed < prompt ? `prompt ${computed}/${prompt}` : `${generated}/${limit}`;
    }
  }

  showNumbers(frame) {
    const time = frame.time_ms / 1000;
    this.lastSecond.push(frame);
    while (this.lastSecond.length > 2 && this.lastSecond[1].time_ms < frame.time_ms - 1000) this.lastSecond.shift();
    const [before] = this.lastSecond;
    const seconds = (frame.time_ms - before.time_ms) / 1000;
    const rate = seconds > 0 ? (frame.generated_tokens - before.generated_tokens) / seconds : 0;
    const steps = frame.steps - before.steps;
    const step = steps > 0 ? (frame.step_time_ms - before.step_time_ms) / steps : 0;
    this.charts.rate.add(time, rate);
    this.charts.step.add(time, step);
    this.charts.running.add(time, frame.running);
    this.charts.queued.add(time, frame.queued);
    const { pages } = frame;
    const numbers = [
      ["Running", frame.running],
      ["Queued", frame.queued],
      ["Tokens per second", rate.toFixed(0)],
      ["Step", `${step.toFixed(1)} ms`],
      ["Steps", frame.steps],
      ["Slots moved", frame.moves],
      ["Pages", pages.total > 0 ? `${pages.used} of ${pages.total}` : "none"],
    ];
    this.numbers.replaceChildren(...numbers.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
  }
}

function newBar(id) {
  const label = el("span", { class: "slot" });
  const prompt = el("span", { class: "prompt" });
  const generated = el("span", { class: "generated" });
  const count = el("span", { class: "count" });
  const track = el("span", { class: "track" }, prompt, generated);
  const row = el("li", { class: "bar", title: `sequence ${id}` }, label, track, count);
  return { row, track, label, prompt, generated, count, slot: undefined };
}

/** Lights up a bar that has moved to another slot. */
function showMove(track) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const { color } = getComputedStyle(track);
  track.animate([{ outline: `2px solid ${color}` }, { outline: "2px solid transparent" }], 900);
}
