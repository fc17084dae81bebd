// Figures of the last half minute: rates from counters, percentiles from histograms that only grow.

const WINDOW_S = 30;
const SHARES = [0.5, 0.9, 0.99];
const IDLE = 0.05; // of a processor: of an engine that does less, everything is a large share

export class Figures {
  constructor() {
    this.bounds = {};
    this.reset();
  }

  reset() {
    this.kept = []; // { at, server, costs, and some of the snapshot }
  }

  add(message) {
    if (message.engine.unavailable) return;
    const { snapshot, costs } = message.engine, at = snapshot.time_s;
    const { prompt_tokens: prompt, cached_tokens: cached, computed_tokens: computed, padding_tokens: padding, vectors, encoded } = snapshot;
    this.kept.push({ at, server: message.server, costs, prompt, cached, computed, padding, vectors, encoded, running: snapshot.rows[0].length });
    this.drop();
  }

  // Nothing has happened since the last message: a run that is over has no messages where nothing happened.
  restUntil(until) {
    const last = this.kept.at(-1);
    if (!last || last.at >= until) return;
    if (last.rests) this.kept.pop();
    this.kept.push({ ...last, at: until, rests: true });
    this.drop();
  }

  drop() {
    while (this.kept.length > 2 && this.kept[0].at < this.kept.at(-1).at - WINDOW_S) this.kept.shift();
  }

  // How much something grew in the last seconds.
  growth(read, overS = WINDOW_S) {
    const last = this.kept.at(-1), first = this.kept.find((each) => each.at >= last.at - overS) || this.kept[0];
    return { by: read(last) - read(first), seconds: last.at - first.at };
  }

  rate(read) {
    const { by, seconds } = this.growth(read, 5);
    return seconds > 0 ? by / seconds : 0;
  }

  // Two counters that grow together, one as a share of the other; null while neither does.
  share(part, whole) {
    const all = this.growth(whole).by;
    return all > 0 ? this.growth(part).by / all : null;
  }

  // Over time: what a message says holds until the next one.
  mean(read) {
    const kept = this.kept, seconds = kept.at(-1).at - kept[0].at;
    if (!(seconds > 0)) return read(kept.at(-1));
    return kept.reduce((sum, each, at) => sum + read(each) * ((kept[at + 1] ?? each).at - each.at), 0) / seconds;
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
        const longest = this.kept.at(-1).server.longest[name]; // a bucket may reach far beyond what was seen
        return Math.min(longest, low + ((high - low) * (share * total - below)) / counts[bucket]);
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

export const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`);

export function drawGauges(place, figures, snapshot, blocks, numSlots) {
  const total = snapshot.num_blocks.reduce((sum, count) => sum + count, 0), held = (blocks.held + blocks.shared) / Math.max(1, total);
  const computed = snapshot.preempted - snapshot.swapped;
  const values = [
    [`running, of ${numSlots.toLocaleString("en")} rows`, snapshot.rows[0].length],
    ["rows in use, mean", percent(figures.mean((each) => each.running) / Math.max(1, numSlots))],
    ["waiting", snapshot.num_waiting],
    [figures.kept.at(-1).server.engines ? "output tokens / s, all engines" : "output tokens / s", Math.round(figures.rate((each) => each.server.tokens[0]))],
    ["KV blocks held", percent(held)],
    ["prompt tokens found cached", percent(figures.share((each) => each.cached, (each) => each.prompt))],
    ["padding, of computed tokens", percent(figures.share((each) => each.padding, (each) => each.computed))],
    ["preempted: recomputed / swapped", `${computed.toLocaleString("en")} / ${snapshot.swapped.toLocaleString("en")}`],
    ["finished", snapshot.finished],
  ];
  if (snapshot.vectors) values.push(["vectors / s", Math.round(figures.rate((each) => each.vectors))]);
  const [pagesHeld, pagesCached, pages] = snapshot.media ?? [0, 0, 0];
  if (pages) {
    values.push(["pictures encoded / s", figures.rate((each) => each.encoded).toFixed(1)]);
    values.push(["pages of pictures: held / kept / all", `${pagesHeld} / ${pagesCached} / ${pages}`]);
  }
  if (snapshot.draft_tokens) {
    const taken = snapshot.accepted_tokens, lost = snapshot.draft_tokens - taken;
    values.push(["drafts taken / lost", `${taken.toLocaleString("en")} / ${lost.toLocaleString("en")}`]);
  }
  if (figures.kept.at(-1).costs) values.push(...costs(figures));
  while (place.children.length < values.length) {
    const gauge = document.createElement("div");
    gauge.className = "gauge";
    gauge.append(document.createElement("b"), document.createElement("span"));
    place.append(gauge);
  }
  values.forEach(([name, value], index) => {
    const [number, label] = place.children[index].children;
    number.textContent = typeof value === "number" ? value.toLocaleString("en") : value;
    number.classList.toggle("long", number.textContent.length > 7);
    label.textContent = name;
  });
}

// Phases of a CPU step, as shares of all threads' time.
const PRODUCTS = ["heads", "products", "gated", "logits"];
const phaseSum = (each, names) => names.reduce((sum, name) => sum + (each.costs.phase_s?.[name] ?? 0), 0);

function phases(figures) {
  const all = Object.keys(figures.kept.at(-1).costs.phase_s ?? {});
  if (!all.length) return [];
  const shares = [PRODUCTS, ["attention"], ["waiting"]].map((names) => figures.share((each) => phaseSum(each, names), (each) => phaseSum(each, all)));
  const shown = shares[0] === null ? "–" : `${shares.map((share) => Math.round(100 * share)).join("/")} %`;
  return [["of a CPU step: products / attention / waiting", shown]];
}

// What it takes: energy where the device tells, and what this page costs the engine.
function costs(figures) {
  const found = [], tokens = figures.growth((each) => each.server.tokens[0]).by;
  if (figures.kept.at(-1).costs.energy_j !== null) {
    const joules = figures.growth((each) => each.costs.energy_j).by;
    found.push(["joules / output token", tokens > 0 ? (joules / tokens).toPrecision(3) : "–"]);
  }
  found.push(...phases(figures));
  const used = figures.growth((each) => each.costs.cpu_s);
  const share = figures.share((each) => each.costs.watch_cpu_s, (each) => each.costs.cpu_s);
  found.push(["of the engine's CPU for this page", used.by > IDLE * used.seconds ? percent(share) : "idle"]);
  return found;
}

export function drawLatencies(place, figures) {
  const lines = [["first token", "ttft"], ["between tokens", "itl"], ["end to end", "e2e"]];
  if (!place.rows.length) {
    for (const [label] of [[""], ...lines]) {
      const row = place.insertRow(), title = document.createElement("th");
      title.textContent = label;
      row.append(title);
      for (const share of SHARES) {
        const cell = document.createElement(label ? "td" : "th");
        cell.textContent = label ? "–" : `p${100 * share}`;
        row.append(cell);
      }
    }
  }
  lines.forEach(([, name], line) =>
    SHARES.forEach((share, column) => {
      place.rows[line + 1].cells[column + 1].textContent = milliseconds(figures.percentile(name, share));
    }),
  );
}

// Levels below the device: what requests and copies hold, what can be hit, and the rest.
export function drawLevels(place, snapshot) {
  place.replaceChildren(
    ...(snapshot.below ?? []).map(([name, held, cached, places, hits, stored, loaded, failed, isOff]) => {
      const [line, label, bar, moves] = ["div", "span", "i", "small"].map((tag) => document.createElement(tag));
      label.textContent = isOff ? `${name} (off)` : name;
      label.className = isOff ? "problem" : "";
      const failures = failed ? `, ${failed.toLocaleString("en")} copies failed` : "";
      moves.textContent = `${hits.toLocaleString("en")} tokens hit · ${stored.toLocaleString("en")} blocks stored, ${loaded.toLocaleString("en")} loaded${failures}`;
      bar.style.setProperty("--of-held", `${(100 * held) / places}%`);
      bar.style.setProperty("--of-used", `${(100 * Math.min(places, held + cached)) / places}%`);
      line.append(label, bar, `${cached.toLocaleString("en")} of ${places.toLocaleString("en")} blocks hold a prefix`, moves);
      return line;
    }),
  );
}

export function drawTenants(place, snapshot) {
  const blocks = snapshot.rows[snapshot.columns.indexOf("blocks")], shares = snapshot.tenants.map((name) => ({ name, rows: 0, blocks: 0 }));
  snapshot.tenant_of.forEach((tenant, index) => {
    shares[tenant].rows += 1;
    shares[tenant].blocks += blocks[index];
  });
  const all = Math.max(1, blocks.reduce((sum, count) => sum + count, 0)), rows = Math.max(1, snapshot.tenant_of.length);
  const lines = shares.sort((one, other) => other.rows - one.rows).slice(0, 12);
  place.replaceChildren(
    ...lines.map((each) => {
      const line = document.createElement("div"), name = document.createElement("span"), bar = document.createElement("i");
      name.textContent = each.name;
      name.title = each.name;
      bar.style.setProperty("--share", `${(100 * each.rows) / rows}%`);
      line.append(name, bar, `${each.rows} row${each.rows === 1 ? "" : "s"}, ${percent(each.blocks / all)} of KV`);
      return line;
    }),
  );
  if (!lines.length) place.textContent = "No request is running.";
}
