// One request: its way as a waterfall, and its story in the engine's own sentences.

import { ask } from "./feed.js";
import { milliseconds } from "./figures.js";
import { phases } from "./waterfall.js";

const AGAIN_MS = 1000;

export class Drawer {
  // `pathOf` says where a request is explained, by its number or by the id of its answer. `onStory` is called when the
  // story of another request is known, `onClose` when there is none to see any more.
  constructor(place, stage, names, { pathOf, onStory, onClose }) {
    Object.assign(this, { place, stage, names, pathOf, onStory, onClose });
    this.wanted = null; // a number or an id
    this.request = null; // the number of its first branch, once that is known
    this.explained = null;
    [this.title, this.state, this.falls, this.story] = ["title", "state", "falls", "story"].map((name) => place.querySelector(`#drawer-${name}`));
    place.querySelector("#drawer-close").addEventListener("click", () => this.close());
    addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  close() {
    if (this.wanted === null) return;
    this.place.hidden = true;
    this.wanted = this.request = this.stage.past.shown = null;
    this.from?.focus({ preventScroll: true }); // where it was opened from
    this.onClose();
  }

  async show(wanted) {
    if (this.wanted === null) this.from = document.activeElement;
    this.wanted = wanted;
    this.request = this.stage.past.shown = typeof wanted === "number" ? wanted : null;
    this.explained = null;
    this.place.hidden = false;
    this.state.textContent = "";
    this.story.replaceChildren(line("…"));
    this.falls.replaceChildren();
    this.draw();
    this.place.querySelector("#drawer-close").focus({ preventScroll: true });
    while (this.wanted === wanted && (await this.ask(wanted))) await new Promise((wake) => setTimeout(wake, AGAIN_MS));
  }

  // Whether there may be more to tell later.
  async ask(wanted) {
    try {
      const explained = await ask(this.pathOf(wanted));
      if (this.wanted !== wanted) return false;
      const isNew = !this.explained;
      this.explained = explained;
      this.request ??= explained.branches[0].number ?? null;
      this.stage.past.shown = this.request;
      if (isNew) this.onStory(this.request);
      const ended = explained.branches.every((branch) => branch.state === "ended" || branch.state === "refused");
      this.state.textContent = explained.branches.map((branch) => branch.state).join(", ");
      this.story.replaceChildren(...explained.branches.flatMap((branch) => [...nameOf(branch, explained.branches.length), ...branch.sentences.map(line)]));
      this.draw();
      return !ended;
    } catch (error) {
      if (this.wanted === wanted && !this.explained) this.story.replaceChildren(line(error.message));
      return this.wanted === wanted && !this.explained && error.status !== 404;
    }
  }

  // In the engine that is shown, under whatever numbers it was there.
  wayOf(request) {
    return this.names.numbersOf(request).flatMap((number) => this.stage.wayOf(number));
  }

  // The decisions about each branch; until the engine tells them, as far as the lanes show them.
  branches() {
    if (this.explained) return this.explained.branches;
    const first = this.wayOf(this.request)[0];
    return first ? [{ number: this.request, decisions: [{ kind: "admit", time_s: first.from, seconds: 0 }] }] : [];
  }

  // When the request that is shown came onto a row; null where none is, or never did.
  began() {
    const times = this.explained?.branches.flatMap((branch) => branch.decisions.map((decision) => decision.time_s)) ?? [];
    return this.wanted === null || !times.length ? null : Math.min(...times);
  }

  // Names come in messages of their own, perhaps later than the story.
  entitle() {
    const words = this.names.known.get(this.request)?.words;
    const told = this.explained && [`Request ${this.request ?? ""}`.trim(), this.explained.id, words && `“${words}”`];
    const title = told ? told.filter(Boolean).join(" · ") : `Request ${this.request === null ? this.wanted : this.names.label(this.request)}`;
    if (this.title.textContent !== title) this.title.textContent = title;
  }

  draw() {
    if (this.wanted === null) return;
    this.entitle();
    if (!this.stage.snapshot) return;
    const now = this.stage.snapshot.time_s;
    const found = this.branches().flatMap((branch) => phases(branch.decisions, this.wayOf(branch.number), now));
    if (!found.length) return;
    const from = Math.min(...found.map((phase) => phase.from)), to = Math.max(from + 1e-3, ...found.map((phase) => phase.to));
    this.falls.replaceChildren(
      ...found.map((phase) => {
        const row = document.createElement("div"), label = document.createElement("span"), bar = document.createElement("i");
        label.textContent = phase.label;
        bar.className = phase.kind;
        bar.style.marginLeft = `${(100 * (phase.from - from)) / (to - from)}%`;
        bar.style.width = `${Math.max(0.5, (100 * (phase.to - phase.from)) / (to - from))}%`;
        const track = document.createElement("u"), time = document.createElement("time");
        track.append(bar);
        time.textContent = milliseconds(Math.max(0, phase.to - phase.from));
        row.append(label, track, time);
        return row;
      }),
    );
  }
}

// Of one branch among several; its sentences tell its parent and its score.
function nameOf({ index, number, state }, count) {
  if (count < 2) return [];
  const item = line(`Branch ${index}, request ${number}: ${state}`);
  item.className = "branch";
  return [item];
}

function line(text) {
  const item = document.createElement("li");
  item.textContent = text;
  return item;
}
