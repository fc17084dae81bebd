// The way of one request, phase by phase: from the decisions about it, and from what the stage saw of its rows.

import { BAND, DECODE, ENCODE, PADDING, PLACED, PREFILL, REDO, counted } from "./stage.js";

const MOST = 30;
const WORDS = { [PREFILL]: "prompt", [REDO]: "recomputed", [DECODE]: "decode", [PADDING]: "padding", [PLACED]: "prompt", [ENCODE]: "picture" };

// [{ kind, label, from, to }], in order; `to` is `now` for what goes on.
export function phases(decisions, segments, now) {
  const found = [];
  let since = null, away = null, end = null;
  for (const decision of decisions) {
    const at = decision.time_s;
    if (decision.kind === "admit") {
      if (decision.seconds > 0) found.push({ kind: "quiet", label: "queued", from: at - decision.seconds, to: at });
      since = at;
    } else if (decision.kind === "fork") since = at;
    else if (decision.kind === "preempt") {
      if (since !== null) found.push(...ran(segments, since, at));
      const kind = decision.reason.endsWith("swap") ? "swap" : "recompute";
      away = { kind, label: kind === "swap" ? "preempted: swapped out" : "preempted: recomputed", from: at };
      since = null;
    } else if (decision.kind === "resume") {
      if (away) found.push({ ...away, to: at });
      [since, away] = [at, null];
    } else if (decision.kind === "finish" || decision.kind === "refuse") end = at;
  }
  const until = end ?? now;
  if (away) found.push({ ...away, to: until });
  if (since !== null) found.push(...ran(segments, since, until));
  return found.length > MOST ? joined(found) : found;
}

// A stretch on a row, as the stage saw it; one phase where that is not known any more.
function ran(segments, from, to) {
  const seen = segments.filter((each) => each.kind !== BAND && each.from >= from - 1e-6 && each.from < to);
  if (!seen.length) return [{ kind: "band", label: "on a row", from, to }];
  const first = seen[0].from - from > 0.05 ? [{ kind: "band", label: "on a row", from, to: seen[0].from }] : [];
  return [
    ...first,
    ...seen.map((each) => ({
      kind: each.kind,
      label: WORDS[each.kind] + counted(each),
      from: each.from,
      to: Math.min(to, each.to ?? to),
      tokens: each.tokens,
      copied: each.copied,
    })),
  ];
}

// Neighbours of one kind as one phase.
function joined(found) {
  const short = [];
  for (const phase of found) {
    const last = short.at(-1);
    if (last?.kind === phase.kind) {
      Object.assign(last, { to: phase.to, parts: (last.parts ?? 1) + 1, tokens: (last.tokens ?? 0) + (phase.tokens ?? 0), copied: (last.copied ?? 0) + (phase.copied ?? 0) });
      last.label = `${WORDS[last.kind] ?? last.label}${counted(last)} in ${last.parts} parts`;
    } else short.push({ ...phase });
  }
  return short.slice(0, MOST);
}
