// The calls of an answer: a folded card for each, and below it the field for its result. Names and arguments are the
// model's, and stay text.

import { isUnderWay } from "./conversation.js";
import { button, copyButton, element } from "../dom.js";
import { indented, isJson } from "./json.js";

export const isCut = (message) => Boolean(message.calls?.length) && !message.calls.every((call) => isJson(call.arguments || "{}"));

export class CallCards {
  // `onSend` gets the results, one for each call.
  constructor(message, onSend) {
    Object.assign(this, { message, onSend, cards: [], isEditing: false });
    this.root = element("div", { class: "calls" });
    this.actions = element("div", { class: "line" });
  }

  update(isLast) {
    const { message } = this, calls = message.calls ?? [];
    while (this.cards.length < calls.length) {
      this.cards.push(new Card());
      this.root.append(this.cards.at(-1).root, this.actions);
    }
    const isOpen = !isUnderWay(message) && !isCut(message);
    const isSent = calls.length > 0 && calls.every((call) => call.result !== undefined);
    const canType = isOpen && (this.isEditing || (isLast && !isSent));
    calls.forEach((call, at) => this.cards[at].update(call, canType));
    const shown = canType ? "type" : isSent ? "sent" : "";
    if (this.shown === shown) return; // a button that has the focus keeps it
    this.shown = shown;
    const all = calls.length > 1 ? "results" : "result";
    const typing = [button(`Send ${all}`, () => this.send(), { class: "main" })];
    if (this.isEditing) typing.push(button("Cancel", () => this.edit(false)), element("span", { class: "quiet", text: "Later messages are replaced." }));
    this.actions.replaceChildren(...(canType ? typing : isSent ? [button(`Edit ${all}`, () => this.edit(true))] : []));
  }

  edit(isEditing) {
    this.isEditing = isEditing;
    this.update(false);
    if (isEditing) this.cards[0].area.focus();
  }

  send() {
    const empty = this.cards.find((card) => !card.area.value.trim());
    if (empty) return empty.area.focus();
    this.onSend(this.cards.map((card) => card.area.value));
  }
}

class Card {
  constructor() {
    this.name = element("code");
    this.hint = element("span", { class: "hint" });
    this.given = element("code");
    this.area = element("textarea", { rows: "2", placeholder: "What the tool returns", "aria-label": "Result of the call" });
    this.result = element("pre", { class: "result" });
    const copy = element("div", { class: "code-head" }, element("span", { text: "arguments" }), copyButton(() => this.given.textContent));
    const summary = element("summary", {}, element("span", { class: "quiet", text: "Call" }), " ", this.name, " ", this.hint);
    const code = element("div", { class: "code" }, copy, element("pre", {}, this.given));
    this.root = element("div", { class: "call" }, element("details", {}, summary, code), this.area, this.result);
  }

  update(call, canType) {
    this.name.textContent = call.name;
    this.hint.textContent = call.arguments;
    const given = indented(call.arguments);
    if (this.given.textContent !== given) this.given.textContent = given;
    if (canType && this.area.hidden) this.area.value = call.result ?? "";
    this.area.hidden = !canType;
    this.area.setAttribute("aria-label", `Result of ${call.name}`);
    this.result.hidden = canType || call.result === undefined;
    this.result.textContent = call.result ?? "";
  }
}
