// What is on stage: rows and their requests, folded from the steps of each message, and checked against the state the
// message carries. Keeps the last minute for the pictures. Draws nothing.

export const KEPT_S = 60;
export const PREFILL = "prefill", DECODE = "decode", RECOMPUTE = "recompute", SWAP = "swap", FINISH = "finish";

export class Stage {
  constructor() {
    this.rows = new Map(); // row -> { request, joined, decodingSince }
    this.segments = []; // { row, request, from, to, kind, tokens }; `to` is null while it goes on
    this.marks = []; // { row, request, at, kind, rule }
    this.steps = []; // { seq, t, done, d, p, b, r, w, f }
    this.bySeq = new Map();
    this.scene = null;
    this.seq = 0;
    this.number = null; // of the last message
    this.checked = 0;
    this.disagreements = 0;
    this.finished = new Map(); // request -> { from, to, row, rule }, of the last minute
  }

  apply(message) {
    const cut = message.engine;
    if (cut.unavailable) return;
    const missed = this.number !== null && message.n !== this.number + 1;
    if (this.number === null || missed || cut.first || cut.dropped) this.begin(cut);
    else {
      for (const step of cut.steps) this.step(step);
      for (const [seq, at] of cut.done) this.complete(seq, at);
      if (cut.cleared) this.clear(cut.scene.time_s);
      this.check(cut.scene);
    }
    this.number = message.n;
    this.scene = cut.scene;
    this.forget(cut.scene.time_s - KEPT_S);
  }

  // Anew from the state of a message: what came before is not known.
  begin(cut) {
    for (const row of [...this.rows.keys()]) this.leave(row, cut.scene.time_s);
    const [rows, requests, , , , , , , decoding] = cut.scene.rows;
    rows.forEach((row, index) => {
      this.join(row, requests[index], cut.scene.time_s);
      if (decoding[index]) this.decode(row, cut.scene.time_s);
    });
    this.seq = cut.scene.seq;
  }

  step(step) {
    if (step.cleared) this.clear(step.t);
    for (const note of step.notes || []) this.note(note, step.t);
    for (const row of step.leaves || []) this.leave(row, step.t);
    for (const [row, request] of step.joins || []) this.join(row, request, step.t);
    for (const row of step.off || []) this.rest(row, step.t);
    for (const [row, tokens] of step.spans || []) this.span(row, tokens, step);
    for (const row of step.on || []) this.decode(row, step.t);
    const kept = { ...step, done: null };
    this.steps.push(kept);
    this.bySeq.set(step.seq, kept);
    this.seq = step.seq;
  }

  complete(seq, at) {
    const step = this.bySeq.get(seq);
    if (!step) return;
    step.done = at;
    for (const segment of step.open || []) segment.to = at;
  }

  note([kind, request, rule], at) {
    if (kind !== "preempt" && kind !== "finish" && kind !== "fail") return;
    for (const [row, held] of this.rows) {
      if (held.request !== request) continue;
      const what = kind === "preempt" ? (rule.endsWith("swap") ? SWAP : RECOMPUTE) : FINISH;
      this.marks.push({ row, request, at, kind: what, rule });
      if (kind !== "preempt") this.finished.set(request, { from: held.joined, to: at, row, rule });
      return;
    }
  }

  join(row, request, at) {
    this.rows.set(row, { request, joined: at, open: null });
  }

  leave(row, at) {
    this.rest(row, at);
    this.rows.delete(row);
  }

  decode(row, at) {
    const held = this.rows.get(row);
    if (!held || held.open) return;
    held.open = { row, request: held.request, from: at, to: null, kind: DECODE, tokens: 0 };
    this.segments.push(held.open);
  }

  rest(row, at) {
    const held = this.rows.get(row);
    if (held?.open) held.open.to = at;
    if (held) held.open = null;
  }

  span(row, tokens, step) {
    const held = this.rows.get(row);
    if (!held) return;
    const segment = { row, request: held.request, from: step.t, to: null, kind: PREFILL, tokens };
    this.segments.push(segment);
    (step.open ||= []).push(segment);
  }

  clear(at) {
    for (const row of [...this.rows.keys()]) this.leave(row, at);
  }

  // The rows that steps say must be those the state says.
  check(scene) {
    const [rows, requests] = scene.rows;
    const left = new Set(scene.left);
    const live = [...this.rows].filter(([row]) => !left.has(row));
    const same = live.length === rows.length && rows.every((row, at) => this.rows.get(row)?.request === requests[at]);
    this.checked += 1;
    if (!same || this.seq !== scene.seq) this.disagreements += 1;
  }

  forget(before) {
    this.segments = this.segments.filter((segment) => segment.to === null || segment.to > before);
    this.marks = this.marks.filter((mark) => mark.at > before);
    const old = this.steps.findIndex((step) => step.t > before);
    for (const step of this.steps.splice(0, old < 0 ? this.steps.length : old)) this.bySeq.delete(step.seq);
    for (const [request, end] of this.finished) if (end.to < before) this.finished.delete(request);
  }

  column(name) {
    return this.scene.rows[this.scene.columns.indexOf(name)];
  }
}
