// The one place where a message is shown. A view is made once for a message and follows it while it changes.

import { CallCards, isCut } from "./calls.js";
import { canGoOn, isLive, isUnderWay } from "./conversation.js";
import { button, copyButton, element } from "../dom.js";
import { indented, isJson } from "./json.js";
import { Markdown } from "./markdown.js";
import { TokenText } from "./tokens.js";

const NUM_BRANCHES = 3, MOST_BRANCHES = 8; // of a fork
const TOO_LONG = new Set(["context_length_exceeded"]);
const SETTINGS = new Set(["response_format", "tools", "tool_choice"]); // what a server refuses of them is said beside the field

export class MessageView {
  // `actions` are what a reader can do with it: edit, regenerate, continue, fork, inject, stop, tryNow, explain, see,
  // sendResults, openSettings. A branch among others has no regenerate. Only the last message has all of them.
  constructor(message, actions, isLast) {
    Object.assign(this, { message, actions, isLast });
    this.body = element("div", { class: "body", dir: "auto" });
    this.state = element("div", { class: "state" });
    this.foot = element("div", { class: "foot" });
    const name = element("h3", { class: "unseen", text: message.role === "user" ? "You" : "Answer" });
    this.root = element("article", { class: `message ${message.role}` }, name, this.body, this.state, this.foot);
    if (message.role !== "user") this.makeParts();
    this.update();
  }

  // An answer is reasoning, its text in one of two shapes, and calls.
  makeParts() {
    const thought = element("div", { class: "thought", dir: "auto" }), spelled = element("div", { class: "spelled", dir: "auto" });
    this.thinking = element("details", { class: "thinking" }, element("summary"), thought);
    this.thought = new Markdown(thought);
    this.markdown = new Markdown(this.body);
    this.spelled = new TokenText(spelled);
    this.calls = new CallCards(this.message, (results) => this.actions.sendResults(this.message, results));
    this.body.before(this.thinking);
    this.body.after(spelled, this.calls.root);
  }

  update() {
    const { message, isLast } = this;
    if (message.role === "user") {
      if (!this.editing) this.body.textContent = message.content;
      this.foot.replaceChildren(button("Edit", () => this.edit()), this.copyButton());
      return;
    }
    this.showThinking();
    this.showText();
    this.calls.update(isLast);
    this.root.setAttribute("aria-busy", String(isUnderWay(message)));
    this.root.dataset.state = message.state;
    this.showFoot(isLast);
    this.showState(isLast);
  }

  showThinking() {
    const { reasoning, thought_ms: ms, content, calls } = this.message, isThinking = isUnderWay(this.message) && !content && !calls?.length;
    this.thinking.hidden = !reasoning;
    if (!reasoning) return;
    this.thinking.firstChild.textContent = isThinking ? "Thinking…" : `Thought for ${ms >= 100 ? (ms / 1000).toFixed(1) : "less than 0.1"} s`;
    this.thought.show(reasoning);
  }

  showText() {
    const { message } = this, view = viewOf(message), isText = view === "text", isSpelled = view === "tokens" || view === "raw";
    this.body.hidden = isSpelled;
    this.spelled.place.hidden = !isSpelled;
    if (isSpelled) this.spelled.show(message.content, view === "tokens" ? message.logprobs : []);
    else this.markdown.show(isText ? message.content : `\`\`\`json\n${indented(message.content)}\n\`\`\``);
  }

  // The ways to see an answer that has several.
  viewButtons() {
    const { message, actions } = this, views = viewsOf(message), seen = viewOf(message);
    if (views.length < 2) return null;
    const see = (view) => button(VIEWS[view], () => actions.see(message, view), { "aria-pressed": String(view === seen) });
    return element("span", { class: "views", role: "group", "aria-label": "Show the answer as" }, ...views.map(see));
  }

  copyButton() {
    return copyButton(() => this.message.content);
  }

  // Figures change with every token, buttons do not: one that has the focus must keep it.
  showFoot(isLast) {
    const { message, actions } = this, shown = [message.state, isLast, message.request, isLive(message), Boolean(message.content), viewOf(message), viewsOf(message)].join(" ");
    if (this.shown !== shown) {
      this.shown = shown;
      this.figures = element("span", { class: "figures" });
      const canAsk = isLast && !isUnderWay(message);
      this.foot.replaceChildren(
        ...[
          this.viewButtons(),
          message.content && !isUnderWay(message) ? this.copyButton() : null,
          canAsk && actions.regenerate ? button("Regenerate", actions.regenerate) : null,
          ...(isLast ? this.branchButtons() : []),
          message.request ? button("Explain", () => actions.explain(message), { title: "Why it took as long as it did" }) : null,
          message.request ? element("a", { href: laneOf(message), target: "_blank", rel: "opener", text: "Lane", title: "Show its lane on the live page" }) : null,
          this.figures,
        ].filter(Boolean),
      );
    }
    this.figures.textContent = figuresOf(message).join(" · ");
  }

  // An answer can be forked once its text has begun.
  branchButtons() {
    const { message, actions } = this, count = element("input", { type: "number", min: "2", max: String(MOST_BRANCHES), value: String(NUM_BRANCHES), "aria-label": "Number of branches" });
    const fork = button("Fork into", () => count.reportValidity() && actions.fork(message, Number(count.value)), { title: "Go on in several ways from here, side by side" });
    const canFork = isLive(message) && message.content && !message.calls?.length, canInject = isLive(message) || canGoOn(message);
    return [
      canFork ? element("span", { class: "fork" }, fork, count) : null,
      canInject ? button("Inject", () => this.inject(), { title: "Put text into the answer; the model goes on behind it" }) : null,
    ];
  }

  inject() {
    if (this.injecting) return this.injecting.firstChild.focus();
    const area = element("textarea", { rows: "2", "aria-label": "Text to put into the answer", placeholder: "The model goes on behind this text" });
    const leave = () => {
      this.injecting.remove();
      this.injecting = null;
    };
    const put = () => {
      if (!area.value) return area.focus();
      leave();
      this.actions.inject(this.message, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) put();
      else if (event.key === "Escape") leave();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.injecting = element("div", { class: "inject" }, area, element("div", { class: "line" }, button("Put in", put, { class: "main" }), button("Cancel", leave)));
    this.foot.before(this.injecting);
    this.root.scrollIntoView({ block: "end" });
    area.focus({ preventScroll: true });
  }

  // What there is to say of an answer that is not simply there, with what can be done about it. While it only counts down
  // its buttons stay.
  showState(isLast) {
    const { message, actions } = this, { problem } = message;
    clearTimeout(this.timer);
    const parts = isUnderWay(message) ? waitingParts(message, actions) : endedParts(message, isLast ? actions : null);
    this.state.className = problem ? "state problem" : "state";
    const labels = parts.map((part) => part.tagName === "BUTTON" ? part.textContent : part.className).join("|");
    if (this.labels === labels && parts.length) this.state.firstChild.textContent = parts[0].textContent;
    else this.state.replaceChildren(...parts);
    this.labels = labels;
    if (isUnderWay(message) && problem?.retryAt) this.timer = setTimeout(() => this.showState(isLast), 500);
  }

  edit() {
    if (this.editing) return this.editing.focus();
    const area = element("textarea", { "aria-label": "Edit the message", rows: "1" });
    area.value = this.message.content;
    const leave = () => {
      this.editing = null;
      this.body.classList.remove("editing");
      this.update();
    };
    const send = () => {
      const text = area.value.trim();
      if (!text) return;
      leave();
      this.actions.edit(this.message, text);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else if (event.key === "Escape") leave();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.editing = area;
    this.body.classList.add("editing");
    const note = element("span", { class: "quiet", text: "Later messages are replaced." });
    this.body.replaceChildren(area, element("div", { class: "line" }, button("Send", send, { class: "main" }), button("Cancel", leave), note));
    this.foot.replaceChildren();
    area.style.height = `${area.scrollHeight + 2}px`;
    area.focus();
  }
}

const VIEWS = { json: "JSON", raw: "Raw text", text: "Text", tokens: "Probabilities" };

// JSON that is complete is laid out, and raw beside that.
function viewsOf({ form, state, content, logprobs }) {
  const views = form === "json" && state === "done" && isJson(content) ? ["json", "raw"] : ["text"];
  return logprobs?.length && content ? [...views, "tokens"] : views;
}

function viewOf(message) {
  const views = viewsOf(message), first = views.includes("tokens") ? "tokens" : views[0];
  return views.includes(message.view) ? message.view : first;
}

export const laneOf = (message) => `/ui#request=${encodeURIComponent(message.request)}`;

export function figuresOf({ tokens, rate, ttft }) {
  const found = [];
  if (tokens) found.push(`${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`);
  if (rate) found.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  if (ttft !== undefined) found.push(`first after ${ttft < 1000 ? `${ttft} ms` : `${(ttft / 1000).toFixed(1)} s`}`);
  return found;
}

function waitingParts(message, actions) {
  if (message.problem?.retryAt) {
    const seconds = Math.max(1, Math.ceil((message.problem.retryAt - Date.now()) / 1000));
    const text = `${message.problem.message} Trying again in ${seconds} s.`;
    return [element("span", { text }), button("Try now", actions.tryNow), button("Cancel", actions.stop)];
  }
  return message.state === "waiting" ? [element("span", { class: "dots", "aria-label": "Waiting for the first token" })] : [];
}

function endedParts(message, actions) {
  const { content, reasoning, calls, problem } = message, has = content || calls?.length;
  const go = actions && canGoOn(message) && button("Continue", () => actions.continue(message)), again = actions?.regenerate && button("Try again", actions.regenerate);
  const said = (text, ...buttons) => [element("span", { text }), ...buttons.filter(Boolean)];
  if (message.state === "stopped") return has ? said("Stopped.", go || again) : said(reasoning ? "Stopped before the answer." : "Stopped before the first token.", again);
  if (message.state === "failed") {
    if (TOO_LONG.has(problem.code)) return said(`${problem.message} Start a new chat, or edit an earlier message.`);
    if (SETTINGS.has(problem.param)) return said(problem.message, actions && button("Settings", actions.openSettings), again);
    return has ? said(`${problem.message} The answer is incomplete.`, go, again) : said(problem.message, again);
  }
  if (message.finish === "length") return has ? said("The answer reached the maximum length.", go || again) : said("The maximum length was reached before the answer.", again);
  if (!has) return said("The model gave an empty answer.", again);
  return isCut(message) ? said("The arguments of a call are not JSON.", again) : [];
}
