// Two charts of the last minute: what steps were made of, and how many ran and waited.

import uPlot from "./uplot.js";
import { palette } from "./lanes.js";

const HEIGHT = 160, SPAN_S = 60;

export class Charts {
  constructor(steps, batch) {
    this.places = [steps, batch];
    this.charts = null;
  }

  make() {
    const colours = palette(this.places[0]);
    const axis = { stroke: colours.quiet, grid: { stroke: colours.line, width: 0.5 }, ticks: { show: false }, size: 46 };
    const seconds = { ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => `${Math.round(tick)} s`) };
    const series = (label, stroke, more = {}) => ({ label, stroke, width: 1.5, points: { show: false }, ...more });
    const options = (lines) => ({
      width: 300,
      height: HEIGHT,
      legend: { live: false },
      cursor: { drag: { x: false, y: false } },
      scales: { x: { time: false, range: [-SPAN_S, 0] }, y: { range: (_, low, high) => [0, Math.max(1, high)] } },
      axes: [seconds, axis],
      series: [{ label: "ago" }, ...lines],
    });
    const filled = (colour) => ({ fill: colour + "55" });
    this.charts = [
      new uPlot(
        options([
          series("prompt + decode", colours.prefill, filled(colours.prefill)),
          series("decode", colours.decode, filled(colours.decode)),
          series("budget", colours.quiet, { dash: [4, 4], width: 1 }),
        ]),
        [[0], [0], [0], [0]],
        this.places[0],
      ),
      new uPlot(
        options([series("running", colours.decode, filled(colours.decode)), series("waiting", colours.prefill)]),
        [[0], [0], [0]],
        this.places[1],
      ),
    ];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of this.charts || []) chart.destroy();
      this.charts = null;
    });
  }

  draw(stage, now) {
    if (!this.charts) this.make();
    const steps = thinned(stage.steps, 600), ago = steps.map((step) => step.t - now);
    const data = [
      [ago, steps.map((step) => step.p + step.d), steps.map((step) => step.d), steps.map((step) => step.b || null)],
      [ago, steps.map((step) => step.r), steps.map((step) => step.w)],
    ];
    this.charts.forEach((chart, index) => {
      const width = this.places[index].clientWidth;
      if (chart.width !== width) chart.setSize({ width, height: HEIGHT });
      chart.setData(ago.length ? data[index] : data[index].map(() => [0]), true);
    });
  }
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
