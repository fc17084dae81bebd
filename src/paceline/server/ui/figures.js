// Figures of the last half minute: rates from counters, percentiles from histograms that only grow.

const WINDOW_S = 30;

export class Figures {
  constructor() {
    this.bounds = {};
    this.kept = []; // { at, server, scene }
  }

  add(message) {
    if (message.engine.unavailable) return;
    const at = message.engine.scene.time_s;
    this.kept.push({ at, server: message.server, scene: message.engine.scene });
    while (this.kept.length > 2 && this.kept[0].at < at - WINDOW_S) this.kept.shift();
  }

  get span() {
    return this.kept.length > 1 ? this.kept.at(-1).at - this.kept[0].at : 0;
  }

  rate(read, overS = 5) {
    const last = this.kept.at(-1), first = this.kept.find((each) => each.at >= last.at - overS) || this.kept[0];
    return last.at > first.at ? (read(last) - read(first)) / (last.at - first.at) : 0;
  }

  percentile(name, share) {
    const bounds = this.bounds[name];
    if (!bounds || this.kept.length < 2) return null;
    const last = this.kept.at(-1).server[name], first = this.kept[0].server[name];
    const counts = last.map((count, bucket) => count - first[bucket]);
    const total = counts.reduce((sum, count) => sum + count, 0);
    if (!total) return null;
    let below = 0;
    for (let bucket = 0; bucket < counts.length; bucket++) {
      if (below + counts[bucket] >= share * total) {
        const low = bucket ? bounds[bucket - 1] : 0, high = bounds[bucket] ?? low;
        return low + ((high - low) * (share * total - below)) / counts[bucket];
      }
      below += counts[bucket];
    }
    return bounds.at(-1);
  }
}

export function milliseconds(seconds) {
  if (seconds === null) return "–";
  if (seconds >= 1) return `${seconds.toFixed(seconds >= 10 ? 0 : 1)} s`;
  return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

export function drawGauges(place, figures, stage, about) {
  const scene = stage.scene, slots = about.engine.max_num_seqs;
  const held = scene.num_blocks.reduce((sum, count) => sum + count, 0) - (stage.steps.at(-1)?.f ?? 0);
  const total = scene.num_blocks.reduce((sum, count) => sum + count, 0);
  const both = (name) => `${milliseconds(figures.percentile(name, 0.5))} / ${milliseconds(figures.percentile(name, 0.99))}`;
  const hits = scene.prompt_tokens ? `${Math.round((100 * scene.cached_tokens) / scene.prompt_tokens)} %` : "–";
  const values = [
    ["running of " + slots, scene.rows[0].length],
    ["waiting", scene.num_waiting],
    ["output tokens / s", Math.round(figures.rate((each) => each.server.tokens[0]))],
    ["TTFT p50 / p99", both("ttft")],
    ["between tokens p50 / p99", both("itl")],
    ["end to end p50 / p99", both("e2e")],
    ["KV blocks held", stage.steps.length ? `${Math.round((100 * held) / Math.max(1, total))} %` : "–"],
    ["prompt tokens cached", hits],
    ["gave way (swapped)", `${scene.preempted} (${scene.swapped})`],
    ["finished", scene.finished],
  ];
  while (place.children.length < values.length) {
    const gauge = document.createElement("div");
    gauge.className = "gauge";
    gauge.append(document.createElement("b"), document.createElement("span"));
    place.append(gauge);
  }
  values.forEach(([name, value], index) => {
    const [number, label] = place.children[index].children;
    number.textContent = typeof value === "number" ? value.toLocaleString("en") : value;
    label.textContent = name;
  });
}

export function drawTenants(place, scene) {
  const shares = new Map(scene.tenants.map((name) => [name, 0]));
  scene.tenant_of.forEach((tenant) => shares.set(scene.tenants[tenant], shares.get(scene.tenants[tenant]) + 1));
  const lines = [...shares].sort((one, other) => other[1] - one[1]).slice(0, 12);
  place.replaceChildren(
    ...lines.map(([name, rows]) => {
      const line = document.createElement("div"), bar = document.createElement("meter");
      bar.max = scene.tenant_of.length;
      bar.value = rows;
      line.append(name, bar, `${rows} rows`);
      return line;
    }),
  );
  if (!lines.length) place.textContent = "Nobody has a row.";
}
