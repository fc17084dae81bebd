// The chat page: conversations, the one that is shown, and the answers that are being written.

import { keyring } from "../feed.js";
import { Answer } from "./answer.js";
import { newAnswer, newConversation, titleOf } from "./conversation.js";
import { button, byId, element } from "../dom.js";
import { Markdown } from "./markdown.js";
import { MessageView } from "./message.js";
import { Server } from "./server.js";
import { Settings, numSet } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { showStory } from "./story.js";
import { Strip } from "./strip.js";

const SAVE_MS = 1000, TOAST_MS = 8000, NEAR_PX = 48;
const EXAMPLES = ["Explain continuous batching in three sentences.", "Write a Python function that reverses a string.", "Plan a weekend by the sea, as a list."];

const conversations = new Map(); // by id
const running = new Map(); // id of a conversation -> its answer on its way
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
    continue: () => answer(conversation),
    stop: () => running.get(conversation.id)?.stop(),
    tryNow: () => running.get(conversation.id)?.tryNow(),
    explain: (message) => showStory(byId("story"), message),
    sendResults: (message, results) => sendResults(conversation, message, results),
    openSettings,
    see: (message, view) => {
      message.view = view;
      draw(message);
      save(conversation);
    },
  };
  views = conversation.messages.map((message) => new MessageView(message, actions));
  byId("messages").replaceChildren(...views.map((view) => view.root));
  views.forEach((view, at) => view.update(at === views.length - 1));
  document.title = conversation.messages.length ? `${titleOf(conversation)} – Paceline` : "Paceline";
  isPinned = true;
  byId("alternatives").hidden = true; // its token is gone
  openList(false);
  showAll();
  scrollDown();
  if (matchMedia("(pointer: fine)").matches) byId("text").focus();
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
  running.get(id)?.stop();
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

function ask(conversation) {
  conversation.messages.push(newAnswer());
  conversation.updated = Date.now();
  if (conversation === current) choose(conversation);
  answer(conversation);
}

// Writes the last message: from its beginning, or on from where it is.
async function answer(conversation) {
  if (running.has(conversation.id)) return;
  const onRequest = (id) => strip.track(id);
  const onChange = (message) => {
    draw(message);
    saveSoon(conversation);
  };
  const under = new Answer(conversation, { onChange, onRequest });
  running.set(conversation.id, under);
  showAll();
  announce("Answering.");
  await under.run();
  running.delete(conversation.id);
  save(conversation);
  draw(under.message);
  showAll();
  announce(ending(under.message));
  const { problem } = under.message;
  if (problem?.status === 401 || problem?.status === 403 || problem?.status === 0) server.connect();
}

function ending({ state, problem, tokens, calls }) {
  if (state === "failed") return problem.message;
  if (state === "done" && calls?.length) return `The model calls ${calls.map((call) => call.name).join(", ")}.`;
  return state === "stopped" ? "Stopped." : `The answer is complete: ${tokens ?? 0} tokens.`;
}

function regenerate(conversation) {
  replaceFrom(conversation, conversation.messages.length - 1, []);
}

function edit(conversation, message, text) {
  replaceFrom(conversation, conversation.messages.indexOf(message), [{ role: "user", content: text }]);
}

// The results of all calls of an answer; the model goes on with them.
function sendResults(conversation, message, results) {
  const calls = message.calls.map((call, at) => ({ ...call, result: results[at] }));
  if (message !== conversation.messages.at(-1)) return replaceFrom(conversation, conversation.messages.indexOf(message), [{ ...message, calls }]);
  message.calls = calls;
  ask(conversation);
}

// The conversation goes on from here with other messages; those that were there can be had back.
async function replaceFrom(conversation, at, messages) {
  running.get(conversation.id)?.stop();
  while (running.has(conversation.id)) await new Promise((wake) => setTimeout(wake, 10));
  const before = conversation.messages.splice(at, Infinity, ...messages);
  ask(conversation);
  if (before.length < 2 && !before[0]?.content) return;
  toast(before.length > 1 ? `${before.length} messages were replaced.` : "The answer was replaced.", () => {
    running.get(conversation.id)?.stop();
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
    views.forEach((view, at) => changed.has(view.message) && view.update(at === views.length - 1));
    changed.clear();
    if (isPinned) scrollDown();
  });
}

function showAll() {
  const isRunning = running.has(current.id), isReady = server.state === "ready";
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

function toast(text, undo) {
  const place = byId("toast"), hide = () => (place.hidden = true);
  clearTimeout(fading);
  fading = setTimeout(hide, TOAST_MS);
  const undoing = button("Undo", () => {
    hide();
    undo();
  });
  place.replaceChildren(element("span", { text }), undoing);
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
  if (running.has(current.id)) return running.get(current.id).stop();
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
  } else running.get(current.id)?.stop();
}

byId("composer").addEventListener("submit", submit);
byId("text").addEventListener("input", grow);
byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running.has(current.id)) byId("composer").requestSubmit();
});
byId("scroll").addEventListener("scroll", () => {
  const place = byId("scroll");
  isPinned = place.scrollHeight - place.scrollTop - place.clientHeight < NEAR_PX;
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
  for (const under of running.values()) {
    under.stop(); // or the browser ends its request, which looks like a lost connection
    save(under.conversation);
  }
});
for (const text of EXAMPLES) byId("examples").append(button(text, () => server.state === "ready" && send(text)));

for (const conversation of store.all()) conversations.set(conversation.id, conversation);
choose(newest() ?? startNew());
server.connect();
