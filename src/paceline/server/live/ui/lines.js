// The numbers behind the charts: [seconds ago, ...values] for each of them, null where there is nothing to say. A step
// has tokens, so that there are none of a step while the engine rests; tokens a second are 0 then, and requests are
// as many as there are.

const MOST_POINTS = 600;
const REST_S = 0.2; // without a step, from which on the engine rests; about a pixel

// What steps were made of: [ago, prompt and decode, decode, these and padding, budget]; nothing where nothing is padded.
export function ofSteps(steps, now) {
  const runs = stretches(steps), group = Math.ceil(steps.length / MOST_POINTS), points = [];
  const add = (at, step) => points.push([at - now, useful(step), decoded(step), step.padding ? step.p + step.d : null, step.b || null]);
  for (const { found, end } of runs) {
    for (const step of thinned(found, group, (each) => each.p + each.d)) {
      add(step.t, step);
      if (step.n > 1) add(step.u, following(step));
    }
    // The last one holds until it is done, and is wide enough to be seen where it is the only one.
    const last = found.at(-1), held = Math.max(end ?? now, last.u + REST_S), until = Math.max(last.u, Math.min(now, held));
    add(until, last.n > 1 ? following(last) : last);
    points.push([until - now, null, null, null, null]);
  }
  return columns(points, 5);
}

// The steps that were counted with a step: they decode, and compute no prompt.
const following = (step) => ({ ...step, p: 0, padding: step.pr });
const useful = (step) => step.p + step.d - step.padding;
const decoded = (step) => step.d - step.pr; // by rows that have not had their last token

// Tokens a second, of stretches of the engine's clock that are over: [ago, prompt and decode, decode, these and padding].
// They are a second each, or half of one where less than half a minute is shown. Steps are known up to `known`;
// `unknown` are stretches that were not seen.
export function ofSeconds(steps, unknown, known, now, span) {
  const size = span < 30 ? 0.5 : 1, first = Math.ceil((now - span) / size), found = [];
  for (let at = first; (at + 1) * size <= known; at++) {
    const seen = !unknown.some(({ from, to }) => from < (at + 1) * size && to > at * size);
    found.push([(at + 0.5) * size - now, seen ? 0 : null, seen ? 0 : null, null]);
  }
  const add = (at, step) => {
    const stretch = found[Math.floor(at / size) - first];
    if (!stretch || stretch[1] === null) return;
    stretch[1] += useful(step) / size;
    stretch[2] += decoded(step) / size;
    if (step.padding) stretch[3] = (stretch[3] ?? 0) + step.padding / size;
  };
  for (const step of steps) {
    add(step.t, step);
    const more = step.n > 1 ? following(step) : null;
    for (let later = 1; later < step.n; later++) add(step.t + ((step.u - step.t) * later) / (step.n - 1), more);
  }
  for (const stretch of found) if (stretch[3] !== null) stretch[3] += stretch[1];
  return columns(found, 4);
}

// Requests that ran and waited: [ago, running, waiting, rows]. Each count holds until the next one.
export function ofRequests(counts, numSlots, now) {
  const changes = counts.filter((each, at) => !at || each.r !== counts[at - 1].r || each.w !== counts[at - 1].w);
  const holds = ({ r, t }, at) => r === null || (changes[at + 1]?.t ?? now) - t > REST_S;
  const few = thinned(changes, Math.ceil(changes.length / MOST_POINTS), (each) => each.r + each.w, holds);
  const last = counts.at(-1), points = last && last.t < now ? [...few, { ...last, t: now }] : few;
  return columns(points.map(({ t, r, w }) => [t - now, r, w, numSlots]), 4);
}

// Steps between which the engine did not rest, and when the last of them was done; null while it is not.
function stretches(steps) {
  const runs = [];
  let end = -Infinity;
  for (const step of steps) {
    if (step.t - end > REST_S) runs.push({ found: [], end: null });
    end = Math.max(end, step.done ?? step.u, step.u);
    runs.at(-1).found.push(step);
    runs.at(-1).end = step.done === null ? null : end;
  }
  for (const run of runs.slice(0, -1)) run.end ??= run.found.at(-1).u; // how it ended was not seen
  return runs;
}

// One of each group, the one that weighs most, so that no peak is lost; and those that must stay.
function thinned(found, group, weight, stays = () => false) {
  if (group <= 1) return found;
  const few = [];
  for (let first = 0; first < found.length; first += group) {
    const some = found.slice(first, first + group);
    const heaviest = some.reduce((best, each) => (weight(each) > weight(best) ? each : best));
    few.push(...some.filter((each, at) => each === heaviest || stays(each, first + at)));
  }
  return few;
}

function columns(points, count) {
  return Array.from({ length: count }, (_, column) => points.map((point) => point[column]));
}
