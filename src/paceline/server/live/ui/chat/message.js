// The one place where a message is shown. A view is made once for a message and follows it while it changes.

import { isUnderWay } from "./conversation.js";
import { button, copyButton, element } from "../dom.js";
import { Markdown } from "./markdown.js";

const TOO_LONG = new Set(["context_length_exceeded"]);

export class MessageView {
  // `actions` are what a reader can do with it: edit, regenerate, continue, stop, tryNow, explain.
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.body = element("div", { class: "body", dir: "auto" });
    this.state = element("div", { class: "state" });
    this.foot = element("div", { class: "foot" });
    const name = element("h3", { class: "unseen", text: message.role === "user" ? "You" : "Answer" });
    this.root = element("article", { class: `message ${message.role}` }, name, this.body, this.state, this.foot);
    this.markdown = message.role === "user" ? null : new Markdown(this.body);
    this.update(true);
  }

  update(isLast) {
    const { message } = this;
    if (message.role === "user") {
      if (!this.editing) this.body.textContent = message.content;
      this.foot.replaceChildren(button("Edit", () => this.edit()), this.copyButton());
      return;
    }
    this.markdown.show(message.content);
    this.root.setAttribute("aria-busy", String(isUnderWay(message)));
    this.root.dataset.state = message.state;
    this.showFoot(isLast);
    this.showState(isLast);
  }

  copyButton() {
    return copyButton(() => this.message.content);
  }

  // Figures change with every token, buttons do not: one that has the focus must keep it.
  showFoot(isLast) {
    const { message, actions } = this, shown = `${message.state} ${isLast} ${message.request ?? ""}`;
    if (this.shown !== shown) {
      this.shown = shown;
      this.figures = element("span", { class: "figures" });
      const canAsk = isLast && !isUnderWay(message);
      this.foot.replaceChildren(
        ...[
          message.content && !isUnderWay(message) ? this.copyButton() : null,
          canAsk ? button("Regenerate", actions.regenerate) : null,
          message.request ? button("Explain", () => actions.explain(message), { title: "Why it took as long as it did" }) : null,
          message.request ? element("a", { href: laneOf(message), target: "_blank", rel: "opener", text: "Lane", title: "Show its lane on the live page" }) : null,
          this.figures,
        ].filter(Boolean),
      );
    }
    this.figures.textContent = figuresOf(message).join(" · ");
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
      this.update(true);
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
  const go = actions && button("Continue", actions.continue), again = actions && button("Try again", actions.regenerate);
  const said = (text, ...buttons) => [element("span", { text }), ...buttons.filter(Boolean)];
  if (message.state === "stopped") return message.content ? said("Stopped.", go) : said("Stopped before the first token.", again);
  if (message.state === "failed") {
    const { code, message: text } = message.problem;
    if (TOO_LONG.has(code)) return said(`${text} Start a new chat, or edit an earlier message.`);
    return message.content ? said(`${text} The answer is incomplete.`, go, again) : said(text, again);
  }
  if (!message.content) return said("The model gave an empty answer.", again);
  if (message.finish === "length") return said("The answer reached the maximum length.", go);
  return [];
}
