// What the race came to, once every track is done: the order, and how the last mode compares with the first.

import { element } from "../dom.js";
import { milliseconds, percent } from "../figures.js";

const PLACES = ["1st", "2nd", "3rd"];
export const placeName = (index) => PLACES[index] ?? `${index + 1}th`;

// `ended`: { name, finish, reached } of every track, in the order of the tracks.
export function resultCard(ended, numRequests) {
  const order = [...ended].sort((one, other) => one.finish - other.finish);
  const first = ended[0], last = ended.at(-1);
  const podium = order.map((each, index) => element("li", {}, `${placeName(index)} `, element("b", { text: each.name }), ` ${each.finish.toFixed(1)} s`));
  const parts = [element("h2", { text: title(order) }), element("ol", { className: "podium" }, ...podium)];
  if (first !== last) parts.splice(1, 0, element("dl", { className: "gains" }, ...gains(first, last, numRequests)));
  return parts;
}

function title(order) {
  const [winner, second] = order, name = winner.name[0].toUpperCase() + winner.name.slice(1);
  if (!second) return `${name} batching: ${winner.finish.toFixed(1)} s`;
  const ahead = second.finish - winner.finish;
  return `${name} batching is first, ${ahead < 0.1 ? milliseconds(ahead) : `${ahead.toFixed(1)} s`} before ${second.name}`;
}

function gains(first, last, numRequests) {
  const from = first.reached, to = last.reached;
  const times = `${(to.rate / from.rate).toFixed(1)} ×`;
  return [
    gain(times, "output tokens a second", `${from.rate.toFixed(1)} → ${to.rate.toFixed(1)}`, first, last),
    gain(change(from.median, to.median), "median time to an answer", `${milliseconds(from.median)} → ${milliseconds(to.median)}`, first, last),
    gain(`${percent(from.padding)} → ${percent(to.padding)}`, "of the computed tokens are padding", "", first, last),
    gain(change(first.finish, last.finish), `until all ${numRequests} requests are answered`, `${first.finish.toFixed(1)} s → ${last.finish.toFixed(1)} s`, first, last),
  ];
}

function gain(value, name, values, first, last) {
  return element("div", {}, element("dd", { text: value }), element("dt", { text: name }), element("small", { text: [values, `${first.name} → ${last.name}`].filter(Boolean).join(", ") }));
}

function change(from, to) {
  const share = Math.round(100 * (to / from - 1));
  return `${share > 0 ? "+" : share < 0 ? "−" : "±"}${Math.abs(share)} %`;
}
