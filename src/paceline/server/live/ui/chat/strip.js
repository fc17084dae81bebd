// The live batch beside the chat: a lane for each row of the engine, the last seconds of it, the user's own answers highlighted.
//
// Reads the feed of the live page. It is read only while the page is seen: a browser has few connections to a server,
// and watching costs the engine a little.

import { ask, follow } from "../feed.js";
import { DECODE, ENCODE, PLACED, PREFILL, REDO, Stage } from "../stage.js";
import { byId } from "../dom.js";

const WINDOW_S = 15, RATE_S = 3, FRAME_MS = 50;
const LEAST_LANE = 3, MOST_LANE = 14, LEAST_LANES = 6;
const LEAST_FRAMED = 7; // pixels; a frame would hide what is in a lower lane
const MOST_OWN = 64;
const FOLDED = "paceline-chat-batch"; // name under which it is remembered

export class Strip {
  // `onLost` is called when the feed has ended: the server may be gone.
  constructor(place, onLost) {
    Object.assign(this, { place, onLost });
    this.canvas = byId("lanes");
    this.stage = new Stage();
    this.own = new Map(); // id of a request -> its number in the engine
    this.reading = null; // ends the reading of the feed
    this.ahead = null; // of the engine's clock
    this.isRefused = false;
    this.isFolded = remembered();
    byId("batch-fold").addEventListener("click", () => this.fold(!this.isFolded));
    document.addEventListener("visibilitychange", () => this.follow());
    this.fold(this.isFolded);
    requestAnimationFrame((at) => this.frame(at));
  }

  // The server is there, or another key is used.
  restart() {
    this.isRefused = false;
    this.stop();
    this.follow();
  }

  fold(isFolded) {
    this.isFolded = isFolded;
    this.place.classList.toggle("folded", isFolded);
    byId("batch-fold").setAttribute("aria-expanded", String(!isFolded));
    try {
      localStorage.setItem(FOLDED, isFolded ? "folded" : "");
    } catch {} // not remembered
    this.follow();
  }

  follow() {
    const isWanted = !document.hidden && !this.isFolded && !this.isRefused && this.isReady;
    if (!isWanted) return this.stop();
    if (this.reading) return;
    const reading = (this.reading = new AbortController());
    follow("/v1/admin/watch?past=true", (message) => reading.signal.aborted || this.take(message), (state, note) => reading.signal.aborted || this.changed(state, note), reading.signal);
  }

  stop() {
    this.reading?.abort();
    this.reading = null;
    byId("batch-figures").textContent = "";
  }

  changed(state, note) {
    this.setStatus(state, note);
    if (state === "lost") this.onLost();
  }

  setStatus(state, note) {
    this.place.dataset.state = state;
    const words = { key: "Only an admin key may watch the batch.", lost: `The batch cannot be seen now: ${note}` };
    byId("batch-note").textContent = words[state] ?? "";
    if (state !== "live") byId("batch-figures").textContent = "";
    if (state !== "key") return;
    this.isRefused = true;
    this.stop();
  }

  take(message) {
    if (!message.engine) return this.begin(); // the feed begins, with the last minute
    if (message.engine.unavailable) return this.setStatus("lost", message.engine.unavailable);
    this.stage.apply(message);
    const late = performance.now() / 1000 - this.stage.snapshot.time_s;
    this.ahead = this.ahead === null || message.engine.first ? late : Math.min(this.ahead + 0.001, late);
    this.setStatus("live", "");
    byId("batch-figures").textContent = this.figures();
  }

  begin() {
    this.stage.reset();
    this.ahead = null;
  }

  // One's own request, by the id the API gave it; the engine and its feed know it by a number.
  async track(id) {
    try {
      const { branches } = await ask(`/v1/requests/${encodeURIComponent(id)}/explain`);
      for (const { index, number } of branches) this.own.set(index ? `${id}/${index}` : id, number);
      while (this.own.size > MOST_OWN) this.own.delete(this.own.keys().next().value);
    } catch {} // its lane stays one of many
  }

  figures() {
    const { snapshot } = this.stage, tokens = this.stage.decodedSince(snapshot.time_s - RATE_S);
    const parts = [`${this.stage.rows.size} running`];
    if (snapshot.num_waiting) parts.push(`${snapshot.num_waiting} waiting`);
    parts.push(`${Math.round(tokens / RATE_S)} tokens/s`);
    return parts.join(" · ");
  }

  frame(at) {
    requestAnimationFrame((next) => this.frame(next));
    if (at - (this.drawn ?? 0) < FRAME_MS || !this.stage.snapshot || !this.reading) return;
    this.drawn = at;
    this.draw(performance.now() / 1000 - this.ahead);
  }

  // The rows that have a lane: as many as there is room for, the user's own in any case.
  lanes(room) {
    const owned = new Set(this.own.values()), count = Math.max(LEAST_LANES, this.stage.mostRow + 1);
    const height = Math.max(LEAST_LANE, Math.min(MOST_LANE, Math.floor(room / count)));
    const rows = Array.from({ length: Math.min(count, Math.floor(room / height)) }, (_, row) => row);
    const mine = new Set(this.stage.segments.filter((each) => owned.has(each.request)).map((each) => each.row));
    for (const row of mine) if (row >= rows.length) rows[rows.length - 1] = row;
    return { height, owned, places: new Map(rows.map((row, place) => [row, place])) };
  }

  draw(now) {
    const { canvas } = this, scale = devicePixelRatio || 1, width = canvas.clientWidth, room = canvas.clientHeight;
    if (!width || !room) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(room * scale);
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const { height, owned, places } = this.lanes(room), tall = height - Math.max(1, Math.round(height / 5));
    const x = (time) => width * (1 - (now - time) / WINDOW_S);
    pen.scale(scale, scale);
    pen.fillStyle = colour("track");
    for (const place of places.values()) pen.fillRect(0, place * height, width, tall);
    const isOwn = (segment) => owned.has(segment.request);
    const kinds = { [DECODE]: ["other", "own"], [PREFILL]: ["prefill", "prefill"], [REDO]: ["prefill", "prefill"], [PLACED]: ["prefill", "prefill"], [ENCODE]: ["prefill", "prefill"] };
    for (const segment of this.stage.segments) {
      const names = kinds[segment.kind], place = places.get(segment.row), to = segment.to ?? now;
      if (!names || place === undefined || to < now - WINDOW_S) continue;
      pen.fillStyle = colour(names[Number(isOwn(segment))]);
      const from = Math.max(0, x(segment.from));
      pen.fillRect(from, place * height, Math.max(1, x(to) - from), tall);
    }
    for (const [row, { request }] of this.stage.rows) {
      if (!owned.has(request) || !places.has(row) || tall < LEAST_FRAMED) continue;
      pen.strokeStyle = colour("ink");
      pen.strokeRect(0.5, places.get(row) * height + 0.5, width - 1, Math.max(2, tall - 1));
    }
  }
}

function remembered() {
  try {
    return localStorage.getItem(FOLDED) === "folded";
  } catch {
    return false;
  }
}
