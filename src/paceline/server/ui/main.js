// The page: messages go into the stage and the figures, pictures are drawn from them once a frame.

import { BlockMap } from "./blocks.js";
import { Charts } from "./charts.js";
import { chat } from "./chat.js";
import { Drawer } from "./drawer.js";
import { ask, follow, keyring } from "./feed.js";
import { Figures, drawGauges, drawTenants } from "./figures.js";
import { Lanes } from "./lanes.js";
import { Stage } from "./stage.js";

const byId = (id) => document.getElementById(id);
const stage = new Stage(), figures = new Figures(), charts = new Charts(byId("chart-steps"), byId("chart-batch"));
const drawer = new Drawer(byId("drawer"), stage), blocks = new BlockMap(byId("blocks"), byId("block-note"));
const lanes = new Lanes(byId("lanes"), stage, (request) => drawer.show(request));
let about = null, ahead = null, fresh = false;

window.paceline = { stage, figures, blocks, lanes, drawer }; // for tests, and for the curious

function received(message) {
  stage.apply(message);
  figures.add(message);
  if (message.engine.unavailable) return tell("lost", message.engine.unavailable);
  const late = performance.now() / 1000 - message.engine.scene.time_s;
  ahead = ahead === null ? late : Math.min(ahead + 0.001, late); // a late message does not turn time back
  fresh = true;
}

function tell(state, note) {
  const link = byId("link");
  link.dataset.state = state;
  link.textContent = state === "live" ? "live" : state === "key" ? "needs a key" : note || "connecting";
  byId("key").hidden = state !== "key";
  if (state === "key") byId("key-note").textContent = keyring.get() ? note : "";
}

function draw() {
  if (stage.scene && about && !document.hidden) {
    const now = performance.now() / 1000 - ahead;
    lanes.draw(now, about.engine.max_num_seqs);
    if (fresh) {
      fresh = false;
      drawGauges(byId("gauges"), figures, stage, about);
      blocks.draw(stage.scene);
      charts.draw(stage, now);
      drawTenants(byId("tenants"), stage.scene);
      drawer.draw();
      const first = stage.scene.waiting.slice(0, 8).map(([request, , tokens]) => `${request} (${tokens})`);
      byId("waiting").textContent = first.length ? `Next, with their tokens: ${first.join(", ")}` : "Nobody waits.";
    }
  }
  requestAnimationFrame(draw);
}

async function start() {
  try {
    about = await ask("/v1/admin/about");
  } catch (error) {
    if (error.status === 401 || error.status === 403) return tell("key", error.message);
    tell("lost", error.message);
    return setTimeout(start, 1000);
  }
  figures.bounds = about.latency_bounds;
  byId("about").textContent = `${about.model} · ${about.engine.device} · ${about.engine.dtype} · ${about.engine.max_num_seqs} rows · version ${about.version}`;
  follow("/v1/admin/watch", received, tell);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keyring.set(byId("key-text").value.trim());
  start();
});
chat(byId("chat"), byId("chat-answers"), () => about?.model);
start();
requestAnimationFrame(draw);
