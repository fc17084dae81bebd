// The page: messages, live or recorded, go into the stage and the figures; pictures are drawn from them once a frame.

import { BlockMap } from "./blocks.js";
import { Charts } from "./charts.js";
import { chat } from "./chat.js";
import { Drawer } from "./drawer.js";
import { onTheme } from "./colours.js";
import { ask, follow, keyring } from "./feed.js";
import { Figures, drawGauges, drawLatencies, drawTenants } from "./figures.js";
import { Lanes } from "./lanes.js";
import { Player } from "./player.js";
import { Queue } from "./queue.js";
import { Stage } from "./stage.js";
import { Steering } from "./steer.js";

const byId = (id) => document.getElementById(id);
const stage = new Stage(), figures = new Figures(), blocks = new BlockMap(byId("blocks"), byId("block-note"));
const charts = new Charts(byId("chart-steps"), byId("chart-rates"), byId("chart-batch"));
const explanation = (request) => `${explained}/requests/${request}/explain`;
const drawer = new Drawer(byId("drawer"), stage, explanation, () => player?.reach());
const pick = (request) => drawer.show(request);
const lanes = new Lanes(byId("lanes"), stage, pick), queue = new Queue(byId("queue"), byId("queue-note"), stage, pick);
let about = null, engine = null, player = null, steering = null, explained = "/v1/admin", ahead = null;
let fresh = false, outdated = false, before = 0, drawn = 0, charted = 0; // what is to be drawn, and when it was
const frames = []; // milliseconds of the newest frames
const FLASH_S = 1; // how long ago a prefix may have been given up to be framed
const CHARTS_MS = 500; // a minute wide, they hardly move in between
const REST_MS = 100; // between two drawings of what is not the line: a fast replay brings messages in every frame

// For tests and the curious.
window.paceline = { stage, figures, blocks, lanes, queue, drawer, charts, frames, player: () => player };

function take(message) {
  stage.apply(message);
  figures.add(message);
  const isPast = player && player.time - message.engine.scene.time_s > FLASH_S; // of the minute before a place in a run
  if (!isPast) blocks.flash(message.engine.evicted);
}

function received(message) {
  take(message);
  if (message.engine.unavailable) return tell("lost", message.engine.unavailable);
  tell("live", "");
  lanes.commit();
  const late = performance.now() / 1000 - message.engine.scene.time_s;
  ahead = ahead === null || message.engine.first ? late : Math.min(ahead + 0.001, late); // a late message does not turn time back
  fresh = true;
}

function played(messages, anew) {
  if (anew) {
    stage.reset();
    figures.reset();
    blocks.reset();
    blocks.evicted.clear();
    charted = 0;
  }
  messages.forEach(take);
  if (anew && lanes.lanes) lanes.repaint(player.time);
  else lanes.commit();
  fresh = true;
}

function tell(state, note) {
  const link = byId("link"), words = { live: "live", key: "needs a key", recorded: "recorded" };
  if (link.dataset.state === state && state === "live") return;
  link.dataset.state = state;
  link.textContent = words[state] || note || "connecting";
  byId("key").hidden = state !== "key";
  if (state === "key") byId("key-note").textContent = keyring.get() ? note : "";
}

function draw(at) {
  const began = performance.now();
  player?.tick(Math.min(0.25, (at - before) / 1000));
  before = at;
  if (stage.scene && !document.hidden) {
    const now = player ? player.time : performance.now() / 1000 - ahead;
    lanes.draw(now, engine.max_num_seqs);
    // Up to when everything is known: a run that is over has no messages where nothing happened.
    const told = player && stage.isIdle() ? now : stage.scene.time_s;
    if ((fresh || player?.playing) && at - drawn >= REST_MS) drawRest(now, told, at);
    if (outdated && at - charted >= CHARTS_MS) drawCharts(now, told, at);
    frames.push(performance.now() - began);
    if (frames.length > 600) frames.shift();
  }
  requestAnimationFrame(draw);
}

// Everything that hardly changes between two messages.
function drawRest(now, told, at) {
  fresh = false;
  outdated = true;
  drawn = at;
  stage.restUntil(told);
  figures.restUntil(told);
  blocks.draw(stage.scene);
  drawGauges(byId("gauges"), figures, stage.scene, blocks.counts, engine.max_num_seqs);
  drawLatencies(byId("latencies"), figures);
  drawTenants(byId("tenants"), stage.scene);
  queue.draw(now);
  drawer.draw();
}

function drawCharts(now, told, at) {
  outdated = false;
  charted = at;
  charts.draw(stage, now, told, engine.max_num_seqs);
}

// Colours or widths are others: what waits for a message would stay as it was, for as long as a replay is paused.
function again() {
  fresh = true;
  charted = 0;
}

function describe(model) {
  const parts = [model, engine.device, engine.dtype, `${engine.max_num_seqs.toLocaleString("en")} rows`, `version ${about.version}`];
  byId("about").textContent = parts.filter(Boolean).join(" · ");
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
  document.body.dataset.mode = about.recordings ? "recorded" : "live";
  if (about.recordings) {
    tell("recorded", "");
    const onLost = (note) => tell("lost", note), wanted = () => drawer.began();
    player = new Player(byId("player"), about, { onRun: chosen, onMessages: played, onLost, wanted });
  } else {
    engine = about.engine;
    describe(about.model);
    steering ??= new Steering(byId("steering"), about.policies);
    follow("/v1/admin/watch", received, tell);
  }
}

function chosen(run, index) {
  engine = run.engine;
  explained = `/v1/admin/recordings/${index}`;
  drawer.close();
  lanes.during(run.times[0], run.times.at(-1));
  charts.during(run.times.at(-1) - run.times[0]);
  describe(run.name);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keyring.set(byId("key-text").value.trim());
  start();
});
chat(byId("chat"), byId("chat-answers"), () => about?.model);
onTheme(again);
addEventListener("resize", again);
start();
requestAnimationFrame(draw);
