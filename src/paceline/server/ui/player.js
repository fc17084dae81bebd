// Plays a recorded run: fetches its messages in bundles, hands them on by the run's own clock, and goes to any place of it.

import { ask } from "./feed.js";
import { KEPT_S } from "./stage.js";

const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32], MOST_BUNDLES = 64;

export class Player {
  // `onMessages` gets what comes next; with `anew`, after everything before was forgotten.
  constructor(place, about, onRun, onMessages) {
    Object.assign(this, { about, onRun, onMessages });
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
      if (event.key !== " " || event.target.closest("button,input,select,textarea")) return;
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
    this.first = this.times[0];
    this.slider.max = this.times.at(-1) - this.first;
    this.slider.step = Math.max(0.01, this.slider.max / 2000);
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
    const last = this.at(this.time), begin = this.at(this.time - KEPT_S);
    const messages = await this.messages(begin, last);
    if (this.job !== job) return; // somebody wants to be elsewhere by now
    this.next = last + 1;
    this.job = null;
    this.onMessages(messages, true);
  }

  // Once a frame: what is due by now.
  async tick(seconds) {
    if (this.job) return;
    if (this.playing) {
      const ahead = this.time + seconds * Number(this.speeds.value);
      const due = this.at(ahead);
      if (due >= this.next && !this.has(this.next, due)) {
        const job = (this.job = Symbol());
        await this.messages(this.next, due);
        if (this.job === job) this.job = null;
        return; // the clock stood still meanwhile
      }
      this.time = Math.min(ahead, this.times.at(-1));
      if (due >= this.next) {
        const found = [];
        for (; this.next <= due; this.next++) found.push(this.message(this.next));
        this.onMessages(found, false);
      }
      if (this.next < this.times.length) this.load(this.bundleOf(this.next) + 1); // what comes soon
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
    bundles.set(bundle, await coming);
    const needed = this.bundleOf(this.at(this.time - KEPT_S));
    for (const old of bundles.keys()) {
      if (bundles.size <= MOST_BUNDLES) break;
      if (old < needed) bundles.delete(old);
    }
    return bundles.get(bundle);
  }
}
