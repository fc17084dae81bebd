// The page: messages, live or recorded, go into the stage and the figures; pictures are drawn from them once a frame.

import { byId } from "./dom.js";
import { BlockMap } from "./blocks.js";
import { Charts } from "./charts.js";
import { Drawer } from "./drawer.js";
import { onTheme } from "./colours.js";
import { Engines } from "./engines.js";
import { ask, follow, isKeyProblem, keyring } from "./feed.js";
import { Figures, drawGauges, drawLatencies, drawLevels, drawTenants } from "./figures.js";
import { LaneList } from "./lane_list.js";
import { Lanes } from "./lanes.js";
import { Names } from "./names.js";
import { Player } from "./player.js";
import { Queue } from "./queue.js";
import { Sharing } from "./sharing.js";
import { KEPT_S, Stage } from "./stage.js";
import { Steering } from "./steer.js";
import { Traffic } from "./traffic.js";

const stage = new Stage(), figures = new Figures(), blocks = new BlockMap(byId("blocks"), byId("block-note"));
const charts = new Charts(byId("chart-steps"), byId("chart-rates"), byId("chart-batch"));
const names = new Names(), query = new URLSearchParams(location.search), chosenModel = query.get("model");
const sharing = new Sharing(byId("sharing"), chosenModel);
let chosenEngine = query.get("engine"); // of several
const asking = (path, name, value) => (value === null ? path : `${path}${path.includes("?") ? "&" : "?"}${name}=${encodeURIComponent(value)}`);
const ofModel = (path) => asking(path, "model", chosenModel), ofEngine = (path) => asking(ofModel(path), "engine", chosenEngine);
const drawer = new Drawer(byId("drawer"), stage, names, {
  pathOf: (request) => ofModel(`${explained}/requests/${encodeURIComponent(request)}/explain`),
  onStory: opened,
  onClose: () => setHash(""),
});
const pick = (request) => setHash(`#request=${names.firstOf(request)}`);
const gutterOf = (width) => (width > 700 ? 190 : 104);
const lanes = new Lanes(byId("lanes"), stage, pick, gutterOf), list = new LaneList(byId("lane-list"), lanes, stage, names, pick);
const queue = new Queue(byId("queue"), byId("queue-note"), stage, names, pick);
const traffic = new Traffic(byId("traffic"), byId("traffic-note"), byId("traffic-answers"), ofModel("/v1/admin/traffic"));
let about = null, engine = null, engines = null, player = null, steering = null, explained = "/v1/admin", ahead = null, opening = 0;
let fresh = false, outdated = false, before = 0, drawn = 0, charted = 0; // what is to be drawn, and when it was
const frames = []; // milliseconds of the newest frames
const FLASH_S = 1; // how long ago a prefix may have been evicted to be framed
const CHARTS_MS = 500; // a minute wide, they hardly move in between
const REST_MS = 100; // between two drawings of what is not a lane: a fast replay brings messages in every frame
const KEY_NOTES = {
  401: "The server does not know this key.",
  403: "The server knows this key, but it is not an admin key. This page needs one.",
};

// For tests and the curious.
window.paceline = { stage, figures, blocks, lanes, queue, drawer, charts, frames, names, list, traffic, player: () => player };

function take(message) {
  stage.apply(message);
  figures.add(message);
  const isPast = player && player.time - message.engine.snapshot.time_s > FLASH_S; // of the minute before a place in a run
  if (!isPast) blocks.flash(message.engine.evicted);
}

function received(message) {
  names.add(message.names);
  if (!message.engine) return begin(message.past);
  opening = Math.max(0, opening - 1);
  take(message);
  if (!opening) engines?.show(message.server, performance.now() / 1000);
  if (message.engine.unavailable) return setStatus("lost", message.engine.unavailable);
  setStatus("live", "");
  lanes.commit();
  const late = performance.now() / 1000 - message.engine.snapshot.time_s;
  ahead = ahead === null || message.engine.first ? late : Math.min(ahead + 0.001, late); // a late message does not turn time back
  fresh = true;
}

// The feed begins, with messages of the last minute: nothing is drawn before they are here.
function begin(numPast) {
  forget();
  lanes.lanes = 0;
  ahead = null;
  opening = numPast;
}

function forget() {
  stage.reset();
  figures.reset();
  blocks.reset();
  blocks.evicted.clear();
  charted = 0;
}

function played(messages, anew) {
  if (anew) forget();
  messages.forEach(take);
  if (anew && lanes.lanes) lanes.repaint(player.time);
  else lanes.commit();
  fresh = true;
}

// How the page stands with its server: "live", "recorded", "lost" with a note, or "key" with the status of the refusal.
function setStatus(state, note) {
  const link = byId("link"), words = { live: "live", key: "needs a key", recorded: "recorded" };
  if (link.dataset.state === state && state === "live") return;
  link.dataset.state = state;
  link.textContent = words[state] || note || "connecting";
  byId("key").hidden = state !== "key";
  document.body.classList.toggle("locked", state === "key");
  if (state !== "key") return;
  byId("key-note").textContent = keyring.get() ? KEY_NOTES[note] : "";
  keyring.set(""); // a key that is refused is not kept
  byId("key-text").focus();
}

function draw(at) {
  const began = performance.now();
  player?.tick(Math.min(0.25, (at - before) / 1000));
  before = at;
  if (stage.snapshot && !opening && !document.hidden) {
    const now = player ? player.time : performance.now() / 1000 - ahead;
    if (!lanes.lanes && !player) showLast(now);
    lanes.draw(now, engine.max_num_seqs);
    // Up to when everything is known: a run that is over has no messages where nothing happened.
    const known = player && stage.isIdle() ? now : stage.snapshot.time_s;
    if ((fresh || player?.playing) && at - drawn >= REST_MS) drawRest(now, known, at);
    if (outdated && at - charted >= CHARTS_MS) drawCharts(now, known, at);
    frames.push(performance.now() - began);
    if (frames.length > 600) frames.shift();
  }
  requestAnimationFrame(draw);
}

// A page that is opened late shows what there is of the last minute.
function showLast(now) {
  const last = stage.steps.at(-1)?.u ?? now, select = byId("window");
  if (now - last < Number(select.value) || now - last > KEPT_S) return;
  select.value = String(KEPT_S);
  lanes.during(lanes.first, lanes.last, KEPT_S);
}

// Everything that hardly changes between two messages.
function drawRest(now, known, at) {
  fresh = false;
  outdated = true;
  drawn = at;
  stage.restUntil(known);
  figures.restUntil(known);
  blocks.draw(stage.snapshot);
  drawGauges(byId("gauges"), figures, stage.snapshot, blocks.counts, engine.max_num_seqs);
  drawLatencies(byId("latencies"), figures);
  drawLevels(byId("levels"), stage.snapshot);
  sharing.draw(figures);
  drawTenants(byId("tenants"), stage.snapshot);
  queue.draw(now);
  list.draw(drawer.request);
  drawer.draw();
}

function drawCharts(now, known, at) {
  outdated = false;
  charted = at;
  charts.draw(stage, now, known, engine.max_num_seqs);
}

// Colours or widths are others: what waits for a message would stay as it was, for as long as a replay is paused.
function again() {
  fresh = true;
  charted = 0;
}

function describe(model) {
  const parts = [model, about.engines && `engine ${chosenEngine}`, engine.device, engine.dtype, `${engine.max_num_seqs.toLocaleString("en")} rows`, `version ${about.version}`];
  byId("about").textContent = parts.filter(Boolean).join(" · ");
}

async function start() {
  try {
    about = await ask(ofEngine("/v1/admin/about"));
    if (about.engines && chosenEngine === null) {
      chosenEngine = "0";
      about = await ask(ofEngine("/v1/admin/about"));
    }
  } catch (error) {
    if (isKeyProblem(error.status)) return setStatus("key", error.status);
    setStatus("lost", error.message);
    return setTimeout(start, 1000);
  }
  figures.bounds = about.latency_bounds;
  document.body.dataset.mode = about.recordings ? "recorded" : "live";
  if (about.recordings) {
    setStatus("recorded", "");
    const onLost = (note) => setStatus("lost", note), wanted = () => drawer.began();
    player = new Player(byId("player"), about, { onRun: chosen, onMessages: played, onLost, wanted });
  } else {
    engine = about.engine;
    describe(about.model);
    steering ??= new Steering(byId("steering"), about.policies, ofModel);
    if (about.engines) engines ??= new Engines(byId("engines"), Number(chosenEngine), (number) => asking(ofModel(location.pathname), "engine", number));
    byId("guide-engines").hidden = !about.engines;
    follow(ofEngine("/v1/admin/watch?past=true"), received, setStatus);
  }
  linked();
}

// The address names the request whose story is shown: by the number the page shows, or by the id its client was given.
function linked() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("request");
  if (!wanted) drawer.close();
  else if (about) drawer.show(/^\d+$/.test(wanted) ? Number(wanted) : wanted);
}

function setHash(hash) {
  if (location.hash === hash) return linked();
  history.replaceState(null, "", hash || location.pathname + location.search);
  linked();
}

// The story of a request is known, and with it the number of its first branch: its lane is scrolled to.
function opened(request) {
  player?.reach();
  const row = names.numbersOf(request).map((number) => stage.laneOf(number)).findLast((each) => each !== undefined);
  if (row !== undefined && lanes.lanes) lanes.reveal(row);
  list.reach(row ?? -1);
}

function chosen(run, index) {
  engine = run.engine;
  explained = `/v1/admin/recordings/${index}`;
  drawer.close();
  lanes.during(run.times[0], run.times.at(-1), Number(byId("window").value));
  charts.during(run.times.at(-1) - run.times[0]);
  describe(run.name);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keyring.set(byId("key-text").value.trim());
  start();
});
byId("window").addEventListener("change", () => lanes.during(lanes.first, lanes.last, Number(byId("window").value)));
addEventListener("hashchange", linked);
onTheme(again);
addEventListener("resize", again);
start();
requestAnimationFrame(draw);
