// What is on stage: rows and their requests, folded from the steps of each message, and checked against the state the
// message carries. Keeps the last minute for the pictures, and what no picture has taken yet. Draws nothing.

import { Past } from "./past.js";

export const KEPT_S = 60;
export const BAND = "band", PREFILL = "prefill", REDO = "redo", DECODE = "decode", PADDING = "padding", PLACED = "placed", ENCODE = "encode"; // of segments
export const RECOMPUTE = "recompute", SWAP = "swap", FINISH = "finish", FAIL = "fail", FORK = "fork", VECTOR = "vector"; // of marks
const GOOD_ENDS = new Map([["stop", FINISH], ["length", FINISH], ["vector", VECTOR], ["context", FINISH]]);

// The steps of a message one by one. Figures and changes come in columns; of changes, the first says in which step.
function unpack({ steps, changes }) {
  const names = Object.keys(steps);
  const found = steps.seq.map((_, at) => {
    const step = { done: null, open: null };
    for (const name of names) step[name] = steps[name][at];
    return step;
  });
  for (const [name, [places, ...columns]] of Object.entries(changes)) {
    places.forEach((place, at) => {
      const entry = columns.map((column) => column[at]);
      (found[place][name] ||= []).push(entry.length === 1 ? entry[0] : entry);
    });
  }
  return found;
}

// Numbers by row, of pairs of which several may be of one row.
function summed(pairs = []) {
  const found = new Map();
  for (const [row, number] of pairs) found.set(row, (found.get(row) ?? 0) + number);
  return found;
}

// What was counted of a part of a prompt, in words.
export function counted({ tokens, copied }) {
  const words = [];
  if (tokens) words.push(`${tokens.toLocaleString("en")} token${tokens === 1 ? "" : "s"}`);
  if (copied) words.push(`${copied.toLocaleString("en")} copied from contexts`);
  return words.map((each) => `, ${each}`).join("");
}

export class Stage {
  constructor(keptS = KEPT_S) {
    this.keptS = keptS;
    this.onStep = null; // called with each step's number, for tests that compare
    this.past = new Past();
    this.reset();
  }

  reset() {
    this.rows = new Map(); // row -> { request, joined, band, open, again }
    this.rowOf = new Map(); // request -> row
    this.latest = new Map(); // row -> { request, left }: the last one on it, and when it left; null while it is there
    // { row, request, from, to, kind, tokens, copied, padded, placed, seq }; `to` is null while it goes on, `padded` and
    // `placed` are the shares of a prompt's part that are padding, and that are `copied` out of contexts
    this.segments = [];
    this.marks = []; // { row, request, at, kind, rule, back, from }; `from` is the row of the parent, for a fork
    this.steps = []; // { seq, t, n, u, done, open, d, p, padding, pr, b, r, w } and what changed; `n` steps up to the time `u`
    this.bySeq = new Map();
    this.counts = []; // { t, r, w } of steps and of states: how many ran and waited from then on; null: not known
    this.unknown = [{ from: -Infinity, to: Infinity }]; // stretches of time that were not seen
    this.past.reset();
    this.active = new Set(); // segments that go on
    this.ended = []; // segments that have ended and marks that came, since a picture took them
    this.newMarks = [];
    this.gone = new Map(); // request -> { at, kind } of those that were preempted and are not back
    this.back = new Map(); // request -> how it comes back, between the note and the join
    this.parentOf = new Map(); // request -> what it was forked from, until it has a row
    this.endOf = new Map(); // request -> when it ended, until it has left its row
    this.early = new Set(); // requests whose end is known before a step notes it
    this.leftEarly = new Map(); // request -> the row it left since the newest step
    this.snapshot = null;
    this.seq = 0;
    this.number = null; // of the last message
    this.checked = 0;
    this.disagreements = 0;
    this.mostRow = 0; // the highest row ever in use
  }

  apply(message) {
    const delta = message.engine;
    if (delta.unavailable) return;
    const missed = this.number !== null && message.n !== this.number + 1;
    if (this.number === null || missed || delta.first || delta.dropped) this.begin(delta);
    else {
      for (const step of unpack(delta)) this.step(step);
      for (const [seq, at] of delta.done) this.complete(seq, at);
      if (delta.cleared) this.clear(delta.snapshot.time_s);
      this.check(delta.snapshot);
    }
    this.dismiss(delta);
    this.number = message.n;
    this.snapshot = delta.snapshot;
    this.counts.push({ t: delta.snapshot.time_s, r: delta.snapshot.rows[0].length, w: delta.snapshot.num_waiting });
    this.forget(delta.snapshot.time_s - this.keptS);
  }

  // Anew from the state of a message: what came before is not known.
  begin(delta) {
    const now = delta.snapshot.time_s;
    this.miss(now);
    for (const row of [...this.rows.keys()]) this.leave(row, now);
    for (const segment of [...this.active]) this.end(segment, now);
    const column = (name) => delta.snapshot.rows[delta.snapshot.columns.indexOf(name)];
    const rows = column("row"), requests = column("request"), decoding = column("decoding"), padding = column("padding");
    rows.forEach((row, index) => {
      this.join(row, requests[index], now);
      if (decoding[index]) this.decode(row, now, padding[index] ? PADDING : DECODE);
    });
    this.seq = delta.snapshot.seq;
  }

  // What happened between the last state and a time was not seen.
  miss(until) {
    const from = this.snapshot?.time_s ?? -Infinity;
    if (this.snapshot) this.counts.push({ t: from, r: null, w: null });
    else this.unknown = [];
    this.unknown.push({ from, to: until });
    for (const step of this.steps) step.done ??= step.u;
  }

  // Rows that were left since the newest step: an engine with nothing to do makes no step that would say so.
  dismiss(delta) {
    const ends = new Map(delta.ended.map((note) => [note[1], note.at(-1)]));
    for (const note of delta.ended) {
      if (this.early.has(note[1])) continue;
      this.note(note);
      this.early.add(note[1]);
    }
    for (const row of delta.snapshot.left) {
      const request = this.rows.get(row)?.request;
      if (request === undefined) continue;
      this.leave(row, ends.get(request) ?? delta.snapshot.time_s);
      this.leftEarly.set(request, row);
    }
  }

  step(step) {
    if (step.cleared) this.clear(step.t);
    for (const note of step.notes || []) this.note(note);
    this.leftEarly.clear();
    for (const row of step.leaves || []) this.leave(row, step.t);
    for (const [row, request] of step.joins || []) this.join(row, request, step.t);
    for (const row of step.off || []) this.rest(row, step.t);
    const pads = summed(step.pads), placed = summed(step.placed), spans = summed(step.spans);
    for (const row of new Set([...spans.keys(), ...placed.keys(), ...pads.keys()])) {
      this.span(row, spans.get(row) ?? 0, pads.get(row) ?? 0, placed.get(row) ?? 0, step);
    }
    for (const row of step.encodes || []) if (!spans.has(row) && !placed.has(row)) this.part(ENCODE, row, step, {});
    for (const row of step.on || []) this.decode(row, step.t);
    for (const row of step.fills || []) this.decode(row, step.t, PADDING);
    this.steps.push(step);
    this.bySeq.set(step.seq, step);
    this.counts.push({ t: step.t, r: step.r, w: step.w });
    this.onStep?.(step.seq, this);
    this.seq = step.seq + step.n - 1; // with the steps like it that followed
    this.bySeq.set(this.seq, step);
    if (step.n > 1) this.onStep?.(this.seq, this);
  }

  complete(seq, at) {
    const step = this.bySeq.get(seq);
    if (!step) return;
    step.done = at;
    if (seq === step.seq) for (const segment of step.open || []) this.end(segment, at);
  }

  note([kind, request, rule, , against, at]) {
    const row = this.rowOf.get(request) ?? this.leftEarly.get(request);
    if (kind === "resume") this.back.set(request, rule === "swap" ? SWAP : RECOMPUTE);
    if (kind === "fork") this.parentOf.set(request, against);
    if (kind === "preempt") {
      const how = rule.endsWith("swap") ? SWAP : RECOMPUTE;
      this.gone.set(request, { at, kind: how });
      this.mark(row, request, at, how, rule);
    }
    if (kind === "finish" || kind === "fail") {
      if (this.rowOf.has(request)) this.endOf.set(request, at);
      this.gone.delete(request);
      this.parentOf.delete(request);
      if (this.early.delete(request)) return; // known already
      this.mark(row, request, at, GOOD_ENDS.get(rule) ?? FAIL, rule);
    }
  }

  mark(row, request, at, kind, rule, back = false, from = row) {
    if (row === undefined) return; // it had none: it ended while it waited
    const mark = { row, request, at, kind, rule, back, from };
    this.marks.push(mark);
    this.newMarks.push(mark);
  }

  join(row, request, at) {
    const how = this.back.get(request), band = this.open(BAND, row, request, at);
    this.rows.set(row, { request, joined: at, band, open: null, again: how === RECOMPUTE });
    this.rowOf.set(request, row);
    this.latest.set(row, { request, left: null });
    this.mostRow = Math.max(this.mostRow, row);
    if (how) this.mark(row, request, at, how, "resume", true);
    const from = this.rowOf.get(this.parentOf.get(request));
    if (from !== undefined) this.mark(row, request, at, FORK, "fork", true, from);
    this.parentOf.delete(request);
    this.back.delete(request);
    this.gone.delete(request);
  }

  leave(row, at) {
    const held = this.rows.get(row);
    if (!held) return;
    at = Math.min(at, this.endOf.get(held.request) ?? at); // a plan that comes later says that a row is left
    this.endOf.delete(held.request);
    this.rest(row, at);
    this.end(held.band, at);
    this.rows.delete(row);
    this.latest.get(row).left = at;
    if (this.rowOf.get(held.request) === row) this.rowOf.delete(held.request);
  }

  // A row decodes from now on; as padding, when its request has its last token and the batch goes on.
  decode(row, at, kind = DECODE) {
    const held = this.rows.get(row);
    if (!held || held.open?.kind === kind) return;
    this.rest(row, at);
    held.again = false;
    held.open = this.open(kind, row, held.request, at);
  }

  rest(row, at) {
    const held = this.rows.get(row);
    if (held?.open) this.end(held.open, at);
    if (held) held.open = null;
  }

  // Tokens of a prompt that are computed, and those that are copied to their place.
  span(row, tokens, padding, copied, step) {
    const kind = !tokens ? (copied ? PLACED : PADDING) : this.rows.get(row)?.again ? REDO : PREFILL, all = tokens + padding + copied;
    this.part(kind, row, step, { tokens, copied, padded: padding / all, placed: tokens ? copied / all : 0 });
  }

  // What a step does for a row that has a prompt.
  part(kind, row, step, figures) {
    const held = this.rows.get(row);
    if (!held) return;
    const segment = this.open(kind, row, held.request, step.t);
    Object.assign(segment, figures, { seq: step.seq });
    (step.open ||= []).push(segment);
  }

  open(kind, row, request, from) {
    const segment = { kind, row, request, from, to: null, tokens: 0, copied: 0, padded: 0, placed: 0, painted: from };
    this.segments.push(segment);
    this.active.add(segment);
    return segment;
  }

  end(segment, at) {
    if (segment.to !== null) return;
    segment.to = at;
    this.active.delete(segment);
    this.ended.push(segment);
  }

  clear(at) {
    for (const row of [...this.rows.keys()]) this.leave(row, at);
  }

  // The rows that steps say must be those the state says.
  check(snapshot) {
    const [rows, requests] = snapshot.rows;
    const left = new Set(snapshot.left);
    let live = 0;
    for (const row of this.rows.keys()) if (!left.has(row)) live += 1;
    const same = live === rows.length && rows.every((row, at) => this.rows.get(row)?.request === requests[at]);
    this.checked += 1;
    if (!same || this.seq !== snapshot.seq) this.disagreements += 1;
  }

  // What a picture has not drawn yet; asked for once.
  takeUpdates() {
    const updates = { ended: this.ended, marks: this.newMarks };
    this.ended = [];
    this.newMarks = [];
    return updates;
  }

  // Tokens that were decoded since a time, padding left out; steps that are counted together are spread evenly.
  decodedSince(since) {
    let tokens = 0;
    for (let at = this.steps.length - 1; at >= 0 && this.steps[at].u > since; at--) {
      const { t, u, n, d, pr } = this.steps[at], share = t >= since ? 1 : (u - since) / (u - t);
      tokens += (d - pr) * n * share;
    }
    return tokens;
  }

  // No request runs or waits.
  isIdle() {
    return !this.snapshot.rows[0].length && !this.snapshot.num_waiting;
  }

  // Nothing has happened since the last message.
  restUntil(until) {
    if (until > this.snapshot.time_s) this.forget(until - this.keptS);
  }

  // The row a request is on, or was on last; undefined where that is not known.
  laneOf(request) {
    return this.rowOf.get(request) ?? this.segments.findLast((segment) => segment.request === request)?.row;
  }

  // Everything that is known of a request's way, in order.
  wayOf(request) {
    return [...this.past.of(request), ...this.segments.filter((segment) => segment.request === request)];
  }

  forget(before) {
    const isOld = (segment) => segment.to !== null && segment.to <= before;
    const isHere = (request) => this.rowOf.has(request) || this.gone.has(request);
    this.past.take(this.segments.filter((segment) => segment.kind !== BAND && isOld(segment)), isHere);
    this.past.forget(isHere, before);
    this.segments = this.segments.filter((segment) => !isOld(segment));
    this.marks = this.marks.filter((mark) => mark.at > before);
    const old = this.steps.findIndex((step) => step.u > before);
    for (const step of this.steps.splice(0, old < 0 ? this.steps.length : old)) {
      this.bySeq.delete(step.seq);
      this.bySeq.delete(step.seq + step.n - 1);
    }
    const held = this.counts.findLastIndex((each) => each.t <= before); // holds until the next one
    this.counts.splice(0, Math.max(0, held));
    this.unknown = this.unknown.filter((each) => each.to > before);
    if (this.gone.size > 10_000) this.gone.clear(); // of requests that ended without a note
  }
}
