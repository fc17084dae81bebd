// Three charts of the last minute: what steps were made of, tokens a second, and how many ran and waited.

import uPlot from "./uplot.js";
import { onTheme, palette } from "./colours.js";

const HEIGHT = 150, SPAN_S = 60, MOST_POINTS = 600;

export class Charts {
  constructor(...places) {
    this.places = places; // of steps, rates, batch
    this.charts = null;
    onTheme(() => {
      for (const chart of this.charts || []) chart.destroy();
      this.charts = null;
    });
  }

  make() {
    const colours = palette();
    const axis = { stroke: colours.quiet, grid: { stroke: colours.line, width: 0.5 }, ticks: { show: false }, size: 46, font: "11px system-ui" };
    const seconds = { ...axis, size: 26, space: 60, values: (_, ticks) => ticks.map((tick) => (tick ? `${Math.round(tick)} s` : "now")) };
    const series = (label, stroke, more = {}) => ({ label, stroke, width: 1.5, points: { show: false }, ...more });
    const filled = (label, colour) => series(label, colour, { fill: colour + "44" });
    const options = (lines) => ({
      width: 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: [-SPAN_S, 0] }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
      axes: [seconds, axis],
      series: [{ label: "ago" }, ...lines],
    });
    const kinds = [
      [filled("prompt", colours.prefill), filled("decode", colours.decode), series("budget", colours.quiet, { dash: [4, 4], width: 1 })],
      [filled("prompt", colours.prefill), filled("decode", colours.decode)],
      [filled("running", colours.decode), series("waiting", colours.prefill), series("rows", colours.quiet, { dash: [4, 4], width: 1 })],
    ];
    this.charts = kinds.map((lines, index) => new uPlot(options(lines), [[0], ...lines.map(() => [0])], this.places[index]));
  }

  draw(stage, now, numSlots) {
    if (!this.charts) this.make();
    const steps = thinned(stage.steps, MOST_POINTS), ago = steps.map((step) => step.t - now);
    const seconds = perSecond(stage.steps, now);
    const data = [
      [ago, steps.map((step) => step.p + step.d), steps.map((step) => step.d), steps.map((step) => step.b || null)],
      [seconds.map((each) => each.ago), seconds.map((each) => each.p + each.d), seconds.map((each) => each.d)],
      [ago, steps.map((step) => step.r), steps.map((step) => step.w), steps.map(() => numSlots)],
    ];
    this.charts.forEach((chart, index) => {
      const width = this.places[index].clientWidth;
      if (chart.width !== width) chart.setSize({ width, height: HEIGHT });
      chart.setData(data[index][0].length ? data[index] : data[index].map(() => [0]), true);
    });
  }
}

// Tokens that steps computed in each second that is over.
function perSecond(steps, now) {
  const found = [];
  for (let ago = -SPAN_S; ago < 0; ago++) found.push({ ago: ago + 0.5, p: 0, d: 0 });
  for (const step of steps) {
    const second = found[Math.floor(step.t - now) + SPAN_S];
    if (!second) continue;
    second.p += step.p;
    second.d += step.d;
  }
  const first = found.findIndex((each) => each.p + each.d);
  return first < 0 ? [] : found.slice(first);
}

// At most so many, evenly, with the one that computes most of each group: a peak is not lost.
function thinned(steps, most) {
  const group = Math.ceil(steps.length / most);
  if (group <= 1) return steps;
  const found = [];
  for (let at = 0; at < steps.length; at += group) {
    found.push(steps.slice(at, at + group).reduce((best, step) => (step.p + step.d > best.p + best.d ? step : best)));
  }
  return found;
}
