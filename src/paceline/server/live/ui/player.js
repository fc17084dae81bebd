// Plays a recorded run: fetches its messages in bundles, hands them on by the run's own clock, and goes to any place of it.

import { ask } from "./feed.js";
import { KEPT_S } from "./stage.js";

const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32], MOST_BUNDLES = 256;
const MOST_AT_ONCE = 1200; // messages that are played in one go: some tenths of a second

export class Player {
  // `onMessages` gets what comes next, and whether everything before is to be forgotten; `wanted` says from when on
  // messages are needed although they are older than what pictures show, or null.
  constructor(place, about, { onRun, onMessages, onLost, wanted }) {
    Object.assign(this, { about, onRun, onMessages, onLost, wanted });
    const find = (id) => place.querySelector(`#play-${id}`);
    Object.assign(this, { runs: find("run"), button: find("button"), speeds: find("speed"), slider: find("slider"), clock: find("clock") });
    this.runs.replaceChildren(...about.recordings.map((run, index) => new Option(run.name, index)));
    this.runs.parentElement.hidden = about.recordings.length < 2;
    this.speeds.replaceChildren(...SPEEDS.map((speed) => new Option(`${speed} ×`, speed)));
    this.speeds.value = "1";
    this.button.addEventListener("click", () => this.toggle());
    this.slider.addEventListener("input", () => this.seek(this.first + Number(this.slider.value)));
    this.runs.addEventListener("change", () => this.choose(Number(this.runs.value)));
    addEventListener("keydown", (event) => {
      if (event.key !== " " || event.target.closest("button,input:not([type=range]),select,textarea")) return;
      event.preventDefault();
      this.toggle();
    });
    place.hidden = false;
    this.playing = true;
    this.choose(0);
  }

  choose(index) {
    this.index = index;
    this.run = this.about.recordings[index];
    this.times = this.run.times;
    this.bundles = new Map();
    this.first = this.times[0]; // the run's beginning: nothing has happened yet
    this.slider.max = this.times.at(-1) - this.first;
    this.onRun(this.run, index);
    return this.seek(this.first);
  }

  toggle() {
    if (!this.playing && this.time >= this.times.at(-1)) this.seek(this.first);
    this.playing = !this.playing;
    this.show();
  }

  // To a moment of the run; the minute before it is played at once, so that the pictures have their past.
  async seek(time) {
    const job = (this.job = Symbol());
    this.time = Math.min(Math.max(time, this.first), this.times.at(-1));
    this.show();
    const last = this.at(this.time), past = this.at(this.time - KEPT_S);
    this.begin = Math.min(past, Math.max(this.beforeWanted(), last - MOST_AT_ONCE));
    this.oldest = this.begin; // what is being collected is not thrown away
    const messages = await this.attempt(this.begin, last);
    if (this.job === job) this.oldest = null;
    if (this.job !== job || !messages) return; // the viewer is elsewhere by now, or there is nothing to show
    this.next = last + 1;
    this.job = null;
    this.onMessages(messages, true);
  }

  // What is wanted has changed: it may lie before what was played.
  reach() {
    if (this.beforeWanted() < this.begin) this.seek(this.time);
  }

  // The message before the one that tells of what is wanted: of the first that is played only the state counts.
  beforeWanted() {
    const wanted = this.wanted();
    return wanted === null ? Infinity : Math.max(0, this.at(wanted) - 1);
  }

  // Once a frame: what is due by now.
  async tick(seconds) {
    if (this.job) return;
    if (this.playing) {
      const ahead = this.time + seconds * Number(this.speeds.value);
      const due = this.at(ahead);
      if (due >= this.next && !this.has(this.next, due)) {
        const job = (this.job = Symbol());
        await this.attempt(this.next, due);
        if (this.job === job) this.job = null;
        return; // the clock stood still meanwhile
      }
      this.time = Math.min(ahead, this.times.at(-1));
      if (due >= this.next) {
        const found = [];
        for (; this.next <= due; this.next++) found.push(this.message(this.next));
        this.onMessages(found, false);
      }
      if (this.next < this.times.length) this.load(this.bundleOf(this.next) + 1).catch(() => {}); // what comes soon
      if (this.time >= this.times.at(-1)) this.playing = false;
    }
    this.show();
  }

  show() {
    const label = this.playing ? "Pause" : "Play";
    if (this.button.textContent !== label) this.button.textContent = label;
    const text = `${(this.time - this.first).toFixed(1)} of ${Number(this.slider.max).toFixed(1)} s`;
    if (this.clock.textContent !== text) this.clock.textContent = text;
    if (document.activeElement !== this.slider || this.playing) this.slider.value = this.time - this.first;
  }

  // The newest message that is not after a time; the first one before all.
  at(time) {
    let low = 0, high = this.times.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.times[middle] <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  bundleOf(message) {
    return Math.floor(message / this.about.bundle);
  }

  message(number) {
    return this.bundles.get(this.bundleOf(number))[number % this.about.bundle];
  }

  has(from, to) {
    for (let bundle = this.bundleOf(from); bundle <= this.bundleOf(to); bundle++) {
      if (!Array.isArray(this.bundles.get(bundle))) return false;
    }
    return true;
  }

  async messages(from, to) {
    for (let bundle = this.bundleOf(from); bundle <= this.bundleOf(to); bundle++) await this.load(bundle);
    const found = [];
    for (let number = from; number <= to; number++) found.push(this.message(number));
    return found;
  }

  async load(bundle) {
    if (this.bundles.has(bundle) || bundle > this.bundleOf(this.times.length - 1)) return this.bundles.get(bundle);
    const bundles = this.bundles, coming = ask(`/v1/admin/recordings/${this.index}/${bundle}`);
    bundles.set(bundle, coming);
    try {
      bundles.set(bundle, await coming);
    } catch (error) {
      bundles.delete(bundle);
      throw error;
    }
    const first = this.bundleOf(this.oldest ?? this.at(this.time - KEPT_S));
    for (const other of bundles.size > MOST_BUNDLES ? [...bundles.keys()] : []) {
      if (other < first || other > bundle) bundles.delete(other);
    }
    return bundles.get(bundle);
  }

  // Messages, or null with a word to the user when they cannot be had: the command may have been ended.
  async attempt(from, to) {
    try {
      return await this.messages(from, to);
    } catch (error) {
      this.playing = false;
      this.onLost(error.message);
      return null;
    }
  }
}
