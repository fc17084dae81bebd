// The chat page: conversations, the one that is shown, and the answers that are being written.

import { keyring } from "../feed.js";
import { Answer, Fork, change, unknown } from "./answer.js";
import { sideBySide } from "./branches.js";
import { arranged, columnsOf, isLive, isUnderWay, newAnswer, newConversation, titleOf } from "./conversation.js";
import { button, byId, element } from "../dom.js";
import { Markdown } from "./markdown.js";
import { MessageView } from "./message.js";
import { Server } from "./server.js";
import { Settings, numSet } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { showStory } from "./story.js";
import { Strip } from "./strip.js";

const MOST_STREAMS = 4; // a browser has six connections to a server, and the live batch and what a user does need one each
const MORE_TOKENS = 256; // for a branch that goes on, where the settings do not say
const SAVE_MS = 1000, TOAST_MS = 8000, NEAR_PX = 48;
const EXAMPLES = ["Explain continuous batching in three sentences.", "Write a Python function that reverses a string.", "Plan a weekend by the sea, as a list."];

const conversations = new Map(); // by id
const running = new Map(); // id of a conversation -> its answers on their way
const saves = new Map(); // id of a conversation -> the timer of its next save
const changed = new Set(); // messages that are to be drawn
let shownState = ""; // of the server
let current = null, views = [], isPinned = true, isDrawing = false;

const store = new Store((problem) => notice(problem), changedElsewhere);
const server = new Server(serverIs);
const strip = new Strip(byId("batch"), () => server.connect());
const settings = new Settings(byId("settings"), () => {
  showSettings();
  save(current);
});
const sidebar = new Sidebar(byId("list"), { onChoose: (id) => choose(conversations.get(id)), onRename: rename, onDelete: remove });
const announce = (text) => (byId("said").textContent = text); // to a screen reader: beginnings and ends, never the tokens

// For tests and the curious.
window.paceline = { conversations, running, server, store, strip, stage: strip.stage, current: () => current };

// ------------------------------------------------------------ conversations

function choose(conversation) {
  current = conversation;
  const actions = {
    edit: (message, text) => edit(conversation, message, text),
    regenerate: () => regenerate(conversation),
    continue: (message) => goOn(conversation, message),
    fork: (message, count) => fork(conversation, message, count),
    inject: (message, text) => inject(conversation, message, text),
    stop: () => stop(conversation),
    tryNow: () => running.get(conversation.id)?.forEach((under) => under.tryNow?.()),
    explain: (message) => showStory(byId("story"), message),
    sendResults: (message, results) => sendResults(conversation, message, results),
    openSettings,
    see: (message, view) => {
      message.view = view;
      draw(message);
      save(conversation);
    },
  };
  views = [];
  byId("messages").replaceChildren(...conversation.messages.map((message) => show(conversation, message, actions)));
  for (const column of document.querySelectorAll(".branch")) column.scrollTop = column.scrollHeight;
  document.title = conversation.messages.length ? `${titleOf(conversation)} – Paceline` : "Paceline";
  isPinned = true;
  byId("alternatives").hidden = true; // its token is gone
  openList(false);
  showAll();
  scrollDown();
  if (matchMedia("(pointer: fine)").matches) byId("text").focus();
}

// A message, or the branches of it.
function show(conversation, message, actions) {
  const columns = columnsOf(message), isLast = message === conversation.messages.at(-1), isAlone = columns.length === 1;
  const own = columns.map((each) => new MessageView(each, isAlone ? actions : { ...actions, regenerate: null }, isLast));
  views.push(...own);
  if (isAlone) return own[0].root;
  return sideBySide(message, own, isLast ? { use: (branch) => use(conversation, branch), prune: (branch) => prune(conversation, branch) } : null);
}

function begin() {
  const unused = [...conversations.values()].find((each) => !each.messages.length);
  const conversation = unused ?? newConversation(current?.settings);
  if (unused && current) unused.settings = structuredClone(current.settings);
  conversations.set(conversation.id, conversation);
  choose(conversation);
}

function rename(id, title) {
  const conversation = conversations.get(id);
  if (!conversation) return;
  if (title !== conversation.title && title !== titleOf(conversation)) {
    conversation.title = title;
    save(conversation);
  }
  showAll();
}

function remove(id) {
  const conversation = conversations.get(id);
  stop(conversation);
  clearTimeout(saves.get(id));
  saves.delete(id);
  conversations.delete(id);
  store.remove(id);
  if (current.id === id) choose(newest() ?? startNew());
  else showAll();
  toast(`Deleted “${titleOf(conversation)}”.`, () => {
    conversations.set(id, conversation);
    save(conversation);
    choose(conversation);
  });
}

const newest = () => sorted()[0];
const sorted = () => [...conversations.values()].sort((a, b) => b.updated - a.updated);

function startNew() {
  const conversation = newConversation(current?.settings);
  conversations.set(conversation.id, conversation);
  return conversation;
}

function save(conversation) {
  clearTimeout(saves.get(conversation.id));
  saves.delete(conversation.id);
  if (conversation.messages.length && conversations.has(conversation.id)) store.save(conversation);
}

function saveSoon(conversation) {
  if (!saves.has(conversation.id)) saves.set(conversation.id, setTimeout(() => save(conversation), SAVE_MS));
}

function changedElsewhere(id, conversation) {
  if (running.has(id)) return; // this tab is writing it, and saves it again
  if (conversation) conversations.set(id, conversation);
  else conversations.delete(id);
  if (current.id === id) choose(conversation ?? newest() ?? startNew());
  else showAll();
}

// ------------------------------------------------------------ messages

function send(text) {
  current.messages.push({ role: "user", content: text });
  ask(current);
}

const isWriting = (conversation) => running.has(conversation.id) && conversation.messages.slice(-1).flatMap(columnsOf).some(isUnderWay);

const stop = (conversation) => running.get(conversation.id)?.forEach((under) => under.stop());

function ask(conversation) {
  stop(conversation); // branches that the server keeps, or that are not those it goes on with
  conversation.messages.push(newAnswer());
  conversation.updated = Date.now();
  if (conversation === current) choose(conversation);
  answer(conversation, conversation.messages.at(-1));
}

// What an answer on its way calls.
function listeners(conversation) {
  const onRequest = (id) => strip.track(id);
  const onChange = (message) => {
    draw(message);
    saveSoon(conversation);
    if (conversation === current && isWriting(conversation) !== byId("send").classList.contains("stop")) showAll();
  };
  return { onChange, onRequest };
}

// Until it has ended.
async function follow(conversation, under) {
  if (!running.has(conversation.id)) running.set(conversation.id, new Set());
  const all = running.get(conversation.id).add(under);
  showAll();
  const found = await under.run();
  all.delete(under);
  if (!all.size) running.delete(conversation.id);
  save(conversation);
  showAll();
  return found;
}

// Writes the last message or a branch of it: from its beginning, or on from where it is.
async function answer(conversation, message) {
  if ([...(running.get(conversation.id) ?? [])].some((under) => under.message === message)) return;
  announce("Answering.");
  await follow(conversation, new Answer(conversation, message, listeners(conversation)));
  draw(message);
  announce(ending(message));
  const { problem } = message;
  if (problem?.status === 401 || problem?.status === 403 || problem?.status === 0) server.connect();
}

function ending({ state, problem, tokens, calls }) {
  if (state === "failed") return problem.message;
  if (state === "done" && calls?.length) return `The model calls ${calls.map((call) => call.name).join(", ")}.`;
  return state === "stopped" ? "Stopped." : `The answer is complete: ${tokens ?? 0} tokens.`;
}

// ------------------------------------------------------------ branches

// An answer that goes on as the first of several branches.
async function fork(conversation, message, count) {
  if ([...running.values()].reduce((sum, all) => sum + all.size, 0) >= MOST_STREAMS) return toast("Too many answers are on their way: stop some of them first.");
  const onBranches = (branches) => {
    const chosen = conversation.messages.at(-1), columns = columnsOf(chosen), at = columns.indexOf(message);
    if (at < 0) return stop(conversation); // it was pruned meanwhile
    arrange(conversation, [...columns.slice(0, at + 1), ...branches, ...columns.slice(at + 1)], chosen);
    announce(`Forked into ${count} branches.`);
  };
  const temperature = conversation.settings.sampling.temperature ?? server.card.paceline?.default_sampling?.temperature;
  const body = { n: count - 1, ...(temperature === 0 ? { temperature: 1 } : {}) }; // or all of them would be equal
  const problem = await follow(conversation, new Fork(message, body, { ...listeners(conversation), onBranches }));
  if (problem) toast(problem.message);
}

// The last answer has these branches, and the conversation goes on with one of them.
function arrange(conversation, columns, chosen) {
  conversation.messages.splice(-1, 1, arranged(columns, chosen));
  if (conversation === current) choose(conversation);
  save(conversation);
}

const use = (conversation, branch) => arrange(conversation, columnsOf(conversation.messages.at(-1)), branch);

function prune(conversation, branch) {
  const chosen = conversation.messages.at(-1), columns = columnsOf(chosen), left = columns.filter((each) => each !== branch);
  if (isLive(branch)) change(branch, "prune").catch(() => {}); // it has ended meanwhile
  arrange(conversation, left, branch === chosen ? left[0] : chosen);
  arranged([branch], branch);
  toast("The branch was pruned.", () => {
    const last = conversation.messages.at(-1), at = columns.indexOf(branch), now = columnsOf(last);
    if (last.role !== "assistant" || !now.every((each) => columns.includes(each))) return; // the conversation has gone on
    arrange(conversation, [...now.slice(0, at), branch, ...now.slice(at)], last);
  });
}

// Puts text behind what an answer has.
function inject(conversation, message, text) {
  if (isLive(message)) return extend(conversation, message, { text });
  message.content += text;
  message.logprobs?.push(unknown(text));
  answer(conversation, message);
}

function goOn(conversation, message) {
  if (message.held) return extend(conversation, message, {});
  answer(conversation, message);
}

async function extend(conversation, message, body) {
  const more = message.held ? { max_tokens: conversation.settings.sampling.max_tokens ?? MORE_TOKENS } : {};
  try {
    await change(message, "extend", { ...body, ...more });
  } catch (error) {
    toast(error.message);
  }
}

// ------------------------------------------------------------ other answers

function regenerate(conversation) {
  replaceFrom(conversation, conversation.messages.length - 1, []);
}

function edit(conversation, message, text) {
  replaceFrom(conversation, conversation.messages.indexOf(message), [{ role: "user", content: text }]);
}

// The results of all calls of an answer; the model goes on with them.
function sendResults(conversation, message, results) {
  const calls = message.calls.map((call, at) => ({ ...call, result: results[at] }));
  if (columnsOf(conversation.messages.at(-1)).includes(message)) use(conversation, message);
  if (message !== conversation.messages.at(-1)) return replaceFrom(conversation, conversation.messages.indexOf(message), [{ ...message, calls }]);
  message.calls = calls;
  ask(conversation);
}

// The conversation goes on from here with other messages; those that were there can be had back.
async function replaceFrom(conversation, at, messages) {
  stop(conversation);
  while (running.has(conversation.id)) await new Promise((wake) => setTimeout(wake, 10));
  const before = conversation.messages.splice(at, Infinity, ...messages);
  ask(conversation);
  if (before.length < 2 && !before[0]?.content) return;
  toast(before.length > 1 ? `${before.length} messages were replaced.` : "The answer was replaced.", () => {
    stop(conversation);
    conversation.messages.splice(at, Infinity, ...before);
    if (conversation === current) choose(conversation);
    save(conversation);
  });
}

// ------------------------------------------------------------ what is shown

// At most once a frame, however many tokens come.
function draw(message) {
  changed.add(message);
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    for (const view of views) if (changed.has(view.message)) update(view);
    changed.clear();
    if (isPinned) scrollDown();
  });
}

// A branch is a column that scrolls for itself: at its end it stays there.
function update(view) {
  const column = view.root.closest(".branch"), isAtEnd = column && isNearEnd(column);
  view.update();
  if (isAtEnd) column.scrollTop = column.scrollHeight;
}

const isNearEnd = (place) => place.scrollHeight - place.scrollTop - place.clientHeight < NEAR_PX;

function showAll() {
  const isRunning = isWriting(current), isReady = server.state === "ready";
  byId("empty").hidden = current.messages.length > 0;
  byId("send").textContent = isRunning ? "Stop" : "Send";
  byId("send").classList.toggle("stop", isRunning);
  byId("send").disabled = !isRunning && !isReady;
  sidebar.show(sorted().filter((each) => each.messages.length || each === current), current.id, (each) => running.has(each.id));
  showSettings();
}

function showSettings() {
  const count = numSet(current.settings);
  byId("show-settings").textContent = count ? `Settings (${count})` : "Settings";
}

function scrollDown() {
  const place = byId("scroll");
  place.scrollTop = place.scrollHeight;
}

function notice(text) {
  byId("notice").hidden = !text;
  byId("notice").textContent = text ?? "";
}

let fading = null;

function toast(text, undo = null) {
  const place = byId("toast"), hide = () => (place.hidden = true);
  clearTimeout(fading);
  fading = setTimeout(hide, TOAST_MS);
  const undoing = undo && button("Undo", () => {
    hide();
    undo();
  });
  place.replaceChildren(...[element("span", { text }), undoing].filter(Boolean));
  place.hidden = false;
}

function serverIs(state, note) {
  const words = { ready: "ready", key: "needs a key", starting: "starting" }, link = byId("link");
  link.dataset.state = state;
  link.textContent = words[state] ?? "offline";
  link.title = note;
  byId("model").textContent = server.model;
  byId("greeting").textContent = { ready: `Ask ${server.model}`, key: "" }[state] ?? note;
  byId("key").hidden = state !== "key";
  byId("key-note").textContent = state === "key" ? note : "";
  byId("forget-key").hidden = !keyring.get();
  document.body.dataset.server = state;
  if (state === "key") byId("key-text").focus();
  strip.isReady = state === "ready";
  if (state === "ready" && shownState !== "ready") {
    strip.restart();
    showGuide();
  }
  shownState = state;
  if (current) showAll();
}

function showGuide() {
  const body = JSON.stringify({ model: server.model, messages: [{ role: "user", content: "Hello!" }] });
  const key = keyring.get() ? " -H \"Authorization: Bearer $KEY\"" : "";
  const curl = `curl ${location.origin}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${body.replaceAll("'", "'\\''")}'`;
  const python = `from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key="${keyring.get() ? "KEY" : "none"}")\nanswer = client.chat.completions.create(\n    model=${JSON.stringify(server.model)},\n    messages=[{"role": "user", "content": "Hello!"}],\n)\nprint(answer.choices[0].message.content)`;
  byId("guide-code").replaceChildren();
  new Markdown(byId("guide-code")).show("```shell\n" + curl + "\n```\n\n```python\n" + python + "\n```");
}

// ------------------------------------------------------------ what a user does

function openList(isOpen) {
  document.body.classList.toggle("list-open", isOpen);
  byId("show-list").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) byId("new").focus();
}

function openSettings() {
  settings.open(current.settings, server.card.paceline?.default_sampling, current.messages.at(-1)?.problem);
}

function submit(event) {
  event.preventDefault();
  if (isWriting(current)) return stop(current);
  const area = byId("text"), text = area.value.trim();
  if (!text || server.state !== "ready") return;
  area.value = "";
  grow();
  send(text);
}

function grow() {
  const area = byId("text");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 3)}px`;
}

function pressed(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("list-open")) {
    openList(false);
    byId("show-list").focus();
  } else stop(current);
}

byId("composer").addEventListener("submit", submit);
byId("text").addEventListener("input", grow);
byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!isWriting(current)) byId("composer").requestSubmit();
});
byId("scroll").addEventListener("scroll", () => {
  const place = byId("scroll");
  isPinned = isNearEnd(place);
  byId("newest").hidden = isPinned;
  byId("alternatives").hidden = true;
});
byId("newest").addEventListener("click", scrollDown);
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  server.useKey(byId("key-text").value.trim());
});
byId("forget-key").addEventListener("click", () => {
  byId("settings").close();
  byId("key-text").value = "";
  server.useKey("");
});
byId("new").addEventListener("click", begin);
byId("show-list").addEventListener("click", () => openList(!document.body.classList.contains("list-open")));
byId("show-settings").addEventListener("click", openSettings);
byId("show-guide").addEventListener("click", () => byId("guide").showModal());
for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
document.querySelector("main").addEventListener("click", () => openList(false));
addEventListener("keydown", pressed);
addEventListener("pagehide", () => {
  for (const conversation of conversations.values()) {
    if (!running.has(conversation.id)) continue;
    stop(conversation); // or the browser ends its requests, which looks like a lost connection
    save(conversation);
  }
});
for (const text of EXAMPLES) byId("examples").append(button(text, () => server.state === "ready" && send(text)));

for (const conversation of store.all()) conversations.set(conversation.id, conversation);
choose(newest() ?? startNew());
server.connect();
