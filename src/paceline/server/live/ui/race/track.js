// One mode: the messages of its run, folded once and kept whole, its lanes, and what it had reached at any time.

import { element } from "../dom.js";
import { ask } from "../feed.js";
import { milliseconds, percent } from "../figures.js";
import { DIGITS, Lanes } from "../lanes.js";
import { Stage } from "../stage.js";

const ABOUT = {
  static: "waits for a full batch, pads it, and keeps every row until the longest answer has ended",
  dynamic: "the same, but a batch that is not full begins after a short wait",
  continuous: "fills a row in the step after it is left, and pads nothing",
};
const FIGURES = ["tokens out", "tokens / s", "padding", "requests done", "elapsed", "median answer"];
const NOTHING = { tokens: 0, computed: 0, padding: 0 };
const GHOST = 0.25; // how much is seen of what lies ahead in a run that is over while another still runs

export class Track {
  constructor(number, name) {
    Object.assign(this, { number, name });
    this.stage = new Stage(Infinity);
    this.points = []; // { at, tokens, computed, padding } of messages, in seconds since the start
    this.answers = []; // [seconds since the start, seconds since the arrival], in order
    this.have = 0; // messages
    this.status = { state: "waiting", start_s: null, num_messages: 0, answers: [], rows: 1 };
    this.build();
    this.lanes = new Lanes(this.canvas, this.stage, null);
  }

  build() {
    this.values = FIGURES.map(() => element("dd", { text: "–" }));
    const figures = FIGURES.map((name, index) => element("div", {}, element("dt", { text: name }), this.values[index]));
    this.badge = element("span", { className: "badge" });
    this.canvas = element("canvas", { id: `lanes-${this.name}`, "aria-label": `Rows of the batch over time, ${this.name} batching` });
    this.flag = element("span", { className: "flag", hidden: true });
    this.line = element("span", { className: "now" });
    this.course = element("i");
    this.axis = element("div", { className: "axis", "aria-hidden": "true" });
    const title = element("h2", {}, element("b", { text: this.name }), element("span", { className: "quiet", text: ABOUT[this.name] ?? "" }), this.badge);
    const field = element("div", { className: "field" }, element("div", { className: "scroll" }, this.canvas), this.line, this.flag);
    const course = element("div", { className: "course" }, this.course);
    this.place = element("section", { className: "track", "aria-label": `${this.name} batching` }, title, element("dl", { className: "figures" }, ...figures), course, field, this.axis);
  }

  // Seconds from the start to the last answer; null while it runs.
  get finish() {
    return this.status.state === "over" && this.answers.length ? this.answers.at(-1)[0] : null;
  }

  // Up to when everything is known.
  get known() {
    if (this.status.start_s === null) return 0;
    return this.finish ?? Math.max(this.status.now_s - this.status.start_s, this.points.at(-1)?.at ?? 0);
  }

  // What the server says about the run, and the messages that are new.
  async follow(status, bundle) {
    while (this.have < status.num_messages) {
      const before = this.have;
      const messages = await ask(`/v1/admin/recordings/${this.number}/${Math.floor(this.have / bundle)}`);
      for (const message of messages) if (message.n === this.have + 1) this.take(message, status);
      if (this.have === before) break;
    }
    this.status = status;
    this.place.dataset.state = status.state;
    this.stage.mostRow = Math.max(this.stage.mostRow, status.rows - 1);
    this.answers = status.answers.map(([at, seconds]) => [at - status.start_s, seconds]);
    if (this.stage.snapshot) this.lanes.commit();
    else this.canvas.style.height = `${Math.min(430, 18 * status.rows)}px`; // until there is something to draw
  }

  take(message, status) {
    this.have += 1;
    this.stage.apply(message);
    const { snapshot } = message.engine;
    this.points.push({ at: snapshot.time_s - status.start_s, tokens: message.server.tokens[0], computed: snapshot.computed_tokens, padding: snapshot.padding_tokens });
  }

  // What had been reached by a time since the start.
  at(time) {
    const isDone = this.finish !== null && time >= this.finish;
    const point = (isDone ? this.points.at(-1) : last(this.points, time, (each) => each.at)) ?? NOTHING;
    const done = countUntil(this.answers, time, (each) => each[0]);
    const seconds = this.status.state === "waiting" ? 0 : Math.min(time, this.finish ?? time);
    const waits = this.answers.slice(0, done).map((each) => each[1]).sort((one, other) => one - other);
    const middle = waits.length >> 1;
    return {
      tokens: point.tokens,
      rate: seconds > 0 ? point.tokens / seconds : 0,
      padding: point.computed ? point.padding / point.computed : 0,
      done,
      seconds,
      median: waits.length ? (waits.length % 2 ? waits[middle] : (waits[middle - 1] + waits[middle]) / 2) : null,
      isDone,
    };
  }

  // The time all tracks show: from the start to `total` seconds.
  during(total) {
    const width = this.place.clientWidth, fitted = `${total} ${this.status.start_s} ${width}`;
    if (fitted === this.fitted) return;
    this.fitted = fitted;
    this.total = total;
    if (this.status.start_s !== null) this.lanes.during(this.status.start_s, this.status.start_s + total, Infinity);
    const every = tick(total, width || 800), marks = [];
    for (let at = 0; at < total - 0.8 * every; at += every) marks.push(at);
    marks.push(total);
    this.axis.replaceChildren(...marks.map((at) => this.mark(at)));
  }

  mark(at) {
    const text = at === 0 ? "0" : `${Number(at.toPrecision(3))} s`, place = element("span", { text });
    place.style.left = `${(100 * at) / this.total}%`;
    return place;
  }

  draw(time, isGhostShown) {
    const share = Math.min(1, time / this.total), left = (part) => `calc(${DIGITS}px + (100% - ${DIGITS}px) * ${part})`;
    this.line.hidden = this.status.state === "waiting";
    this.line.style.left = left(share);
    const isDone = this.finish !== null && time >= this.finish;
    if (this.flag.hidden === isDone) this.flag.hidden = !isDone;
    if (isDone) {
      this.flag.style.left = left(this.finish / this.total);
      this.flag.classList.toggle("late", this.finish / this.total > 0.95);
    }
    if (!this.stage.snapshot) return;
    const rows = Math.max(this.status.rows, this.stage.mostRow + 1);
    this.lanes.draw(this.status.start_s + time, rows, isGhostShown && this.status.state === "over" ? GHOST : 0);
  }

  // The counters, and how the track stands among the others.
  show(reached, total, badge, isLeading) {
    const { tokens, rate, padding, done, seconds, median } = reached;
    const texts = [tokens.toLocaleString("en"), rate.toFixed(rate < 100 ? 1 : 0), percent(padding), `${done} of ${total ?? "?"}`, `${seconds.toFixed(1)} s`, milliseconds(median)];
    texts.forEach((text, index) => {
      if (this.values[index].textContent !== text) this.values[index].textContent = text;
    });
    this.course.style.width = `${total ? (100 * done) / total : 0}%`;
    if (this.badge.textContent !== badge) this.badge.textContent = badge;
    this.place.dataset.lead = String(isLeading);
  }
}

function countUntil(entries, time, read) {
  let low = 0, high = entries.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (read(entries[middle]) <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

const last = (entries, time, read) => entries[countUntil(entries, time, read) - 1];

// Seconds between two marks of an axis: a round number, with room for its text.
function tick(total, width) {
  const least = (total * 60) / width;
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * size).find((each) => each >= least);
}
