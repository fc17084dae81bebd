// How models share the device, and which adapters are in use. Nothing is shown for one model without adapters.

import { byId, element } from "./dom.js";
import { percent } from "./figures.js";

const IDLE = 0.01; // of the time: of a device that computes less, everything is a large share
const COLOURS = ["decode", "prefill", "finish", "swap", "shared"]; // of the owners of slabs

const count = (number) => number.toLocaleString("en");
const named = (names, all) => names.join(", ") + (all > names.length ? ` and ${count(all - names.length)} more` : "");

export class Sharing {
  constructor(place, chosen) {
    Object.assign(this, { place, chosen, lines: new Map() });
    [this.models, this.slabs, this.adapters] = ["models", "slabs", "adapters"].map((name) => place.querySelector(`#${name}`));
  }

  draw(figures) {
    const { models = [], adapters } = figures.kept.at(-1).server;
    this.place.hidden = !models.length && !adapters;
    byId("guide-models").hidden = !models.length;
    const all = models.reduce((sum, each) => sum + each.share, 0);
    const grown = models.map((_, place) => figures.growth((each) => each.server.models?.[place]?.device_s ?? 0).by);
    const spent = grown.reduce((sum, each) => sum + each, 0), isIdle = spent <= IDLE * figures.growth(() => 0).seconds;
    models.forEach((model, place) => this.line(model, place).show(model, model.share / all, isIdle ? null : grown[place] / spent));
    this.drawSlabs(models);
    this.adapters.textContent = adapters ? adapterWords(adapters).join(" · ") : "";
  }

  // Memory that models share: parts for the weights, the adapters and the KV of each, the rest is free.
  drawSlabs(models) {
    const all = models[0]?.slabs[3] ?? 0;
    this.slabs.hidden = !all;
    if (!all) return;
    const parts = models.flatMap(({ name, slabs: [kv, weights, adapters] }, place) => [
      { name: `${name}: weights`, slabs: weights, colour: COLOURS[place % COLOURS.length], pale: true },
      { name: `${name}: adapters`, slabs: adapters, colour: COLOURS[place % COLOURS.length], pale: true },
      { name: `${name}: KV`, slabs: kv, colour: COLOURS[place % COLOURS.length] },
    ]);
    parts.push({ name: "free", slabs: all - parts.reduce((sum, part) => sum + part.slabs, 0), colour: "free" });
    const shown = parts.filter((part) => part.slabs > 0);
    this.slabs.replaceChildren(...shown.map((part) => slabPart(part, all)));
  }

  // Lines stay the same elements, so that a click between two messages is not lost.
  line(model, place) {
    if (!this.lines.has(model.name)) {
      const isShown = this.chosen ? model.name === this.chosen : place === 0;
      const line = new ModelLine(model.name, isShown);
      this.lines.set(model.name, line);
      this.models.append(line.place);
    }
    return this.lines.get(model.name);
  }
}

class ModelLine {
  constructor(name, isShown) {
    const link = element("a", { href: `?model=${encodeURIComponent(name)}`, text: name, title: name, "aria-current": isShown ? "true" : null });
    [this.standing, this.bar, this.words] = [element("b"), element("i"), element("span")];
    this.place = element("div", {}, link, this.standing, this.bar, this.words);
  }

  show(model, share, part) {
    this.standing.textContent = this.standing.dataset.standing = model.standing;
    this.bar.style.setProperty("--part", percentOf(part ?? 0));
    this.bar.style.setProperty("--share", percentOf(share));
    const lately = part === null ? "idle" : `${percent(part)} of the device`;
    const times = `${lately}, share ${percent(share)} · ${model.device_s.toFixed(1)} s in all`;
    this.words.textContent = `${times} · ${count(model.running)} running, ${count(model.waiting)} waiting`;
  }
}

function slabPart({ name, slabs, colour, pale }, all) {
  const made = element("i", { class: colour + (pale ? " pale" : ""), title: `${name}: ${count(slabs)} of ${count(all)} slabs` });
  made.style.setProperty("--part", percentOf(slabs / all));
  if (slabs / all > 0.08) made.textContent = `${name} ${count(slabs)}`;
  return made;
}

const percentOf = (part) => `${100 * part}%`;

function adapterWords(adapters) {
  const { known, resident, most, running, waiting } = adapters;
  const room = most < known ? ` (room for ${count(most)})` : "";
  return [
    `Adapters: ${count(resident)} of ${count(known)} in memory${room}`,
    running.length ? `running: ${named(running, adapters.num_running)}` : "none running",
    ...(waiting.length ? [`waiting: ${named(waiting, adapters.num_waiting)}`] : []),
    `${count(adapters.read)} read again, ${count(adapters.evicted)} evicted`,
  ];
}
