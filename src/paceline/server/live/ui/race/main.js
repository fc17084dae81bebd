// The race: the tracks of all modes by one clock, which counts seconds since each of them started. While the runs are made
// the clock is that of the run under way; afterwards, and with recorded runs, it is played, paused and moved by hand.

import { byId } from "../dom.js";
import { ask } from "../feed.js";
import { placeName, resultCard } from "./result.js";
import { Track } from "./track.js";

const POLL_MS = 400, COUNTERS_MS = 100;
const LIVE_FRAME_MS = 200; // drawing takes time from the run that is watched
const SPEEDS = [0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32], WANTED_S = 20; // how long a race should take to watch
const SOONEST_S = 10; // shown of a first run whose end is not known
const isStill = matchMedia("(prefers-reduced-motion: reduce)");
const tracks = [];
let status = null, mode = "loading"; // then "live" while runs are made, and "race"
let time = 0, playing = false, total = 1, before = 0, counted = 0;

// For tests and the curious.
window.paceline = { tracks, race: () => ({ mode, time, playing, total, status }), stage: null };

async function follow() {
  try {
    status = await ask("/v1/admin/race");
  } catch (error) {
    if (error.status === 404 || error.status === 401) return notice("There is no race here. Start one with “paceline demo --ui”, or play a recorded one with “paceline demo --replay FOLDER”.");
    setStatus("lost", `no answer: ${error.message}`);
    return setTimeout(follow, 1000);
  }
  if (!tracks.length) {
    tracks.push(...status.tracks.map((each, index) => new Track(index, each.name)));
    byId("tracks").replaceChildren(...tracks.map((track) => track.place));
  }
  byId("what").textContent = [status.what, `${status.tracks[0].rows} rows`, status.num_requests && `${status.num_requests} requests`].filter(Boolean).join(" · ");
  for (const [index, track] of tracks.entries()) await track.follow(status.tracks[index], status.bundle);
  const isOver = tracks.every((track) => track.status.state === "over");
  if (isOver) return ready();
  live();
  setTimeout(follow, POLL_MS);
}

// Runs are being made.
function live() {
  const running = tracks.find((track) => track.status.state === "running");
  mode = "live";
  if (running) setStatus("live", `${running.name} runs, ${tracks.indexOf(running) + 1} of ${tracks.length}`);
  else if (tracks.every((track) => track.status.state === "waiting")) setStatus("waiting", "loading and warming up");
  else setStatus("waiting", "next mode is loading");
}

// Every run is there from its start to its end.
function ready() {
  const wasLive = mode === "live";
  mode = "race";
  for (const track of tracks) track.fitted = null; // drawn anew: while it ran, some ends came later than what was drawn
  measure();
  setStatus("recorded", status.is_live ? "all modes have run" : "recorded");
  const wanted = total / WANTED_S;
  byId("speed").value = SPEEDS.reduce((best, each) => (Math.abs(Math.log(each / wanted)) < Math.abs(Math.log(best / wanted)) ? each : best));
  byId("player").hidden = false;
  seek(wasLive || isStill.matches ? total : 0);
  playing = !wasLive && !isStill.matches;
}

function setStatus(state, text) {
  byId("link").dataset.state = state;
  if (byId("link").textContent !== text) byId("link").textContent = text;
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = false;
  byId("link").hidden = true;
}

// The seconds that are shown: of the longest run, or of the longest so far with some room.
function measure() {
  const longest = Math.max(...tracks.map((track) => track.known));
  let wanted = longest;
  if (mode === "live") {
    const over = Math.max(0, ...tracks.map((track) => track.finish ?? 0));
    const now = tracks.find((track) => track.status.state === "running")?.known ?? 0;
    for (wanted = Math.max(over, SOONEST_S); wanted < now; ) wanted *= 1.5;
  }
  total = Math.max(0.1, wanted);
  for (const track of tracks) track.during(total);
}

function seek(to) {
  time = Math.min(total, Math.max(0, to));
  counted = 0;
}

function toggle() {
  if (mode !== "race") return;
  if (!playing && time >= total) seek(0);
  playing = !playing;
  counted = 0;
}

function again() {
  if (mode !== "race") return;
  seek(0);
  playing = true;
}

// The clock of the run under way, a little late, so that what it shows has come.
function liveTime(seconds) {
  const running = tracks.find((track) => track.status.state === "running");
  if (!running) {
    const over = tracks.filter((track) => track.finish !== null);
    return over.length ? over.at(-1).finish : 0;
  }
  const known = running.known, ahead = time + seconds;
  return ahead > known || known - ahead > 3 * (POLL_MS / 1000) ? Math.max(0, known - POLL_MS / 2000) : ahead;
}

function draw(at) {
  if (mode === "live" && at - before < LIVE_FRAME_MS) return requestAnimationFrame(draw);
  const seconds = Math.min(0.25, (at - before) / 1000);
  before = at;
  if (tracks.length && !document.hidden) {
    if (mode === "live") time = liveTime(seconds);
    else if (playing) {
      time = Math.min(total, time + seconds * Number(byId("speed").value));
      if (time >= total) [playing, counted] = [false, 0];
    }
    measure();
    for (const track of tracks) track.draw(time, mode === "live");
    if (at - counted >= COUNTERS_MS) count(at);
  }
  requestAnimationFrame(draw);
}

// Everything that is read as text.
function count(at) {
  counted = at;
  const reached = tracks.map((track) => track.at(time)), done = tracks.filter((_, index) => reached[index].isDone);
  const order = done.sort((one, other) => one.finish - other.finish);
  const leader = leading(reached);
  tracks.forEach((track, index) => {
    const place = order.indexOf(track);
    let badge = "";
    if (track.status.state === "waiting") badge = "waits for its turn";
    else if (place >= 0) badge = `${placeName(place)} · ${track.finish.toFixed(1)} s`;
    else if (track === leader?.track) badge = `ahead by ${leader.by.toLocaleString("en")} ${leader.by === 1 ? "token" : "tokens"}`;
    const isLeading = place === 0 || (!order.length && track === leader?.track);
    track.show(reached[index], status.num_requests, badge, isLeading);
  });
  showPlayer();
  showResult(reached, order);
}

// The track with most tokens, by how many it is ahead of the next one; null where there is none.
function leading(reached) {
  const begun = tracks.map((track, index) => ({ track, tokens: reached[index].tokens })).filter((each) => each.track.status.state !== "waiting");
  const [first, second] = begun.sort((one, other) => other.tokens - one.tokens);
  return second && first.tokens > second.tokens ? { track: first.track, by: first.tokens - second.tokens } : null;
}

function showPlayer() {
  const label = playing ? "Pause" : "Play", text = `${time.toFixed(1)} of ${total.toFixed(1)} s`;
  if (byId("play").textContent !== label) byId("play").textContent = label;
  if (byId("clock").textContent !== text) byId("clock").textContent = text;
  if (document.activeElement !== byId("slider") || playing) byId("slider").value = time / total;
}

function showResult(reached, order) {
  const isShown = mode === "race" && order.length === tracks.length && time >= total;
  if (byId("result").hidden === !isShown) return;
  byId("result").hidden = !isShown;
  if (isShown) {
    const ended = tracks.map((track, index) => ({ name: track.name, finish: track.finish, reached: reached[index] }));
    byId("result").replaceChildren(...resultCard(ended, status.num_requests));
  }
}

byId("speed").replaceChildren(...SPEEDS.map((speed) => new Option(`${speed} ×`, speed)));
byId("play").addEventListener("click", toggle);
byId("again").addEventListener("click", again);
// A share of the time, since a slider rounds what it holds: its right end must be the end.
byId("slider").addEventListener("input", () => seek(total * Number(byId("slider").value)));
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select,input:not([type=range])")) return;
  const isButton = event.target.closest("button");
  if (event.key === " " && !isButton) toggle();
  else if (event.key === "r" || event.key === "R") again();
  else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && mode === "race") {
    playing = false;
    seek(time + (event.key === "ArrowRight" ? 1 : -1) * (total / 50));
  } else return;
  event.preventDefault();
});
follow();
requestAnimationFrame(draw);
