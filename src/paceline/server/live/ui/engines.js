// The engines of a fleet: a tile for each, and arcs for requests that went on in another one. Nothing is shown for one engine.

import { element } from "./dom.js";
import { percent } from "./figures.js";

const RATE_S = 3; // over which tokens are counted
const ARC_S = 8; // how long an arc is seen
const TOLD = 3; // passages in words
const SVG = "http://www.w3.org/2000/svg";
const WORDS = { ready: "ready", starting: "starting", stuck: "does not answer", lost: "lost", stopped: "stopped", draining: "draining", drained: "drained" };
const TAKING = new Set(["ready", "draining", "drained"]);

const count = (number) => number.toLocaleString("en");
const several = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;

export class Engines {
  // `pathOf` says where an engine's page is.
  constructor(place, chosen, pathOf) {
    Object.assign(this, { place, chosen, pathOf, tiles: new Map(), kept: [] });
    [this.list, this.arcs, this.note] = ["engine-tiles", "engine-arcs", "engine-note"].map((id) => place.querySelector(`#${id}`));
  }

  // As a message brings them; `now` in seconds.
  show({ engines = [], passages = [] }, now) {
    this.place.hidden = engines.length < 2;
    if (this.place.hidden) return;
    this.kept.push({ now, tokens: engines.map((each) => each.output_tokens) });
    while (this.kept.length > 2 && this.kept[1].now <= now - RATE_S) this.kept.shift();
    engines.forEach((engine, place) => this.tile(engine).show(engine, this.rate(place)));
    this.drawArcs(passages);
    const told = passages.slice(-TOLD).reverse().map(passageWords).join(" · ");
    this.note.hidden = !told;
    if (told !== this.note.textContent) this.note.textContent = told;
  }

  rate(place) {
    const first = this.kept[0], last = this.kept.at(-1), seconds = last.now - first.now;
    return seconds > 0 ? (last.tokens[place] - (first.tokens[place] ?? 0)) / seconds : null;
  }

  // Tiles stay the same elements, so that a click between two messages is not lost.
  tile({ number }) {
    if (!this.tiles.has(number)) {
      const tile = new Tile(number, this.pathOf(number), number === this.chosen);
      this.tiles.set(number, tile);
      this.list.append(tile.place);
    }
    return this.tiles.get(number);
  }

  drawArcs(passages) {
    const fresh = passages.filter(([age]) => age < ARC_S), frame = this.list.getBoundingClientRect();
    this.arcs.replaceChildren(...fresh.flatMap((passage) => this.arc(passage, frame)));
  }

  // From the foot of one tile to that of the other, with the number of requests where it ends.
  arc([age, source, target, requests], frame) {
    const [from, to] = [source, target].map((number) => this.tiles.get(number)?.place.getBoundingClientRect());
    if (!from || !to) return [];
    const [x, y, u, v] = [from.left + from.width / 2 - frame.left, from.bottom - frame.top, to.left + to.width / 2 - frame.left, to.bottom - frame.top];
    const deep = Math.max(y, v) + 20, opacity = Math.min(1, 1.6 * (1 - age / ARC_S));
    const path = svg("path", { d: `M${x},${y} C${x},${deep} ${u},${deep} ${u},${v + 3}`, opacity, "marker-end": "url(#engine-arrow)" });
    const words = svg("text", { x: (x + u) / 2, y: Math.max(y, v) + 13, opacity });
    words.textContent = count(requests);
    return [path, words];
  }
}

class Tile {
  constructor(number, path, isChosen) {
    [this.state, this.rows, this.blocks, this.words] = [element("b"), new Bar("rows"), new Bar("KV"), element("small")];
    const title = element("strong", { text: `Engine ${number}` });
    this.place = element("a", { href: path, "aria-current": isChosen ? "true" : null }, title, this.state, this.rows.place, this.blocks.place, this.words);
  }

  show(engine, rate) {
    const { state, running, rows, waiting, kv_usage: held, restarts } = engine;
    this.place.dataset.state = state;
    this.state.textContent = WORDS[state] ?? state;
    this.rows.show(rows ? running / rows : 0, `${count(running)} of ${count(rows)}`);
    this.blocks.show(held, percent(held));
    const words = [rate === null || !TAKING.has(state) ? "– tokens/s" : `${count(Math.round(rate))} tokens/s`, `${count(waiting)} waiting`];
    if (restarts) words.push(restarts === 1 ? "restarted once" : `restarted ${count(restarts)} times`);
    this.words.textContent = words.join(" · ");
  }
}

class Bar {
  constructor(label) {
    [this.bar, this.value] = [element("i"), element("span")];
    this.place = element("span", { class: "line" }, element("span", { text: label }), this.bar, this.value);
  }

  show(part, words) {
    this.bar.style.setProperty("--part", `${100 * part}%`);
    this.value.textContent = words;
  }
}

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function passageWords([age, source, target, requests, tokens]) {
  const behind = tokens ? `, behind ${several(tokens, "token")} of output` : "";
  const way = source === target ? `in engine ${target} again` : `from engine ${source} to engine ${target}`;
  return `${Math.round(age)} s ago: ${several(requests, "request")} went on ${way}${behind}`;
}
