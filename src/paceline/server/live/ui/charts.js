// Three charts of the last minute, or of all of a run that is shorter: what steps were made of, tokens a second, and how many ran and waited.

import uPlot from "./vendor/uplot.js";
import { onTheme, palette } from "./colours.js";
import { ofRequests, ofSeconds, ofSteps } from "./lines.js";

const HEIGHT = 150, SPAN_S = 60;
// Between two lines of the grid: there are no halves of what is counted.
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((size) => [size, 2 * size, 5 * size]);

export class Charts {
  constructor(...places) {
    this.places = places; // of steps, rates, batch
    this.charts = null;
    this.spanS = SPAN_S;
    onTheme(() => this.reset());
  }

  reset() {
    for (const chart of this.charts || []) chart.destroy();
    this.charts = null;
  }

  // Seconds to show: no more than there are.
  during(seconds) {
    this.spanS = Math.min(SPAN_S, Math.max(1, seconds));
    this.reset();
  }

  make() {
    const colours = palette();
    const axis = { stroke: colours.quiet, grid: { stroke: colours.line, width: 0.5 }, ticks: { show: false }, size: 46, font: "11px system-ui" };
    const seconds = { ...axis, size: 26, space: 60, values: (_, ticks) => ticks.map((tick) => (tick ? `${Math.round(tick)} s` : "now")) };
    const series = (label, stroke, more = {}) => ({ label, stroke, width: 1.5, points: { show: false }, ...more });
    const filled = (label, colour) => series(label, colour, { fill: colour + "44" });
    const amounts = { ...axis, space: 22, incrs: WHOLE };
    const options = (lines, bands) => ({
      width: 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: [-this.spanS, 0] }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
      axes: [seconds, amounts],
      series: [{ label: "ago" }, ...lines],
      bands,
    });
    const limit = (label) => series(label, colours.quiet, { dash: [4, 4], width: 1 });
    const counted = (made) => ({ ...made, paths: uPlot.paths.stepped({ align: 1 }) });
    const tokens = [filled("prompt", colours.prefill), filled("decode", colours.decode), series("padding", colours.padding)];
    const padding = [{ series: [3, 1], fill: colours.padding + "66" }]; // between prompts and everything
    const kinds = [
      [[...tokens, limit("budget")], padding],
      [tokens, padding],
      [[counted(filled("running", colours.decode)), counted(series("waiting", colours.prefill)), limit("rows")], []],
    ];
    this.charts = kinds.map(([lines, bands], index) => new uPlot(options(lines, bands), [[0], ...lines.map(() => [0])], this.places[index]));
  }

  // Everything up to `known` is known.
  draw(stage, now, known, numSlots) {
    if (!this.charts) this.make();
    this.data = [
      ofSteps(stage.steps, now),
      ofSeconds(stage.steps, stage.unknown, known, now, this.spanS),
      ofRequests(stage.counts, numSlots, now),
    ];
    this.charts.forEach((chart, index) => {
      const width = this.places[index].clientWidth, data = this.data[index];
      if (chart.width !== width) chart.setSize({ width, height: HEIGHT });
      chart.setData(data[0].length ? data : data.map(() => [0]), true);
    });
  }
}
