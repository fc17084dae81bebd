// One request: its way as a waterfall, and its story in the engine's own sentences.

import { ask } from "./feed.js";
import { milliseconds } from "./figures.js";
import { phases } from "./waterfall.js";

const AGAIN_MS = 1000;

export class Drawer {
  // `onStory` is told when the story of another request is known.
  constructor(place, stage, pathOf, onStory) {
    Object.assign(this, { place, stage, pathOf, onStory });
    this.request = null;
    this.told = null;
    [this.title, this.state, this.falls, this.story] = ["title", "state", "falls", "story"].map((name) => place.querySelector(`#drawer-${name}`));
    place.querySelector("#drawer-close").addEventListener("click", () => this.close());
    addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  close() {
    this.place.hidden = true;
    this.request = this.stage.past.shown = null;
  }

  async show(request) {
    this.request = this.stage.past.shown = request;
    this.told = null;
    this.place.hidden = false;
    this.title.textContent = `Request ${request}`;
    this.state.textContent = "";
    this.story.replaceChildren(line("…"));
    this.falls.replaceChildren();
    this.place.querySelector("#drawer-close").focus({ preventScroll: true });
    while (this.request === request && (await this.ask(request))) await new Promise((wake) => setTimeout(wake, AGAIN_MS));
  }

  // Whether there may be more to tell later.
  async ask(request) {
    try {
      const told = await ask(this.pathOf(request));
      if (this.request !== request) return false;
      const isNew = !this.told;
      this.told = told;
      if (isNew) this.onStory();
      if (told.id) this.title.textContent = `Request ${request} · ${told.id}`;
      const ended = told.branches.every((branch) => branch.state === "ended");
      this.state.textContent = told.branches.map((branch) => branch.state).join(", ");
      this.story.replaceChildren(...told.branches.flatMap((branch) => branch.sentences.map(line)));
      this.draw();
      return !ended;
    } catch (error) {
      if (this.request === request && !this.told) this.story.replaceChildren(line(error.message));
      return this.request === request && !this.told && error.status !== 404;
    }
  }

  // When the request that is shown came onto a row; null where none is, or never did.
  began() {
    const times = this.told?.branches.flatMap((branch) => branch.decisions.map((decision) => decision.time_s)) ?? [];
    return this.request === null || !times.length ? null : Math.min(...times);
  }

  draw() {
    if (this.request === null || !this.told || !this.stage.scene) return;
    const own = this.stage.wayOf(this.request);
    const found = this.told.branches.flatMap((branch) => phases(branch.decisions, own, this.stage.scene.time_s));
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

function line(text) {
  const item = document.createElement("li");
  item.textContent = text;
  return item;
}
