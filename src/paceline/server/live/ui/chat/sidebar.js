// The list of conversations: choose, rename, delete.

import { titleOf } from "./conversation.js";
import { button, element } from "../dom.js";

export class Sidebar {
  constructor(list, { onChoose, onRename, onDelete }) {
    Object.assign(this, { list, onChoose, onRename, onDelete });
  }

  show(conversations, current, isRunning) {
    if (this.list.querySelector("input")) return; // one is being renamed
    const entries = conversations.map((each) => this.entry(each, each.id === current, isRunning(each)));
    this.list.replaceChildren(...entries);
  }

  entry(conversation, isCurrent, isRunning) {
    const title = titleOf(conversation);
    const choose = button(title, () => this.onChoose(conversation.id), { class: "title", "aria-current": isCurrent ? "page" : null, dir: "auto", title });
    const rename = button("✎", () => this.rename(item, conversation), { "aria-label": `Rename ${title}`, title: "Rename" });
    const remove = button("×", () => this.onDelete(conversation.id), { "aria-label": `Delete ${title}`, title: "Delete" });
    const item = element("li", { class: isRunning ? "running" : null }, choose, element("span", {}, rename, remove));
    return item;
  }

  rename(item, conversation) {
    const input = element("input", { "aria-label": "Name of the conversation", maxlength: "120" });
    let isOver = false;
    const leave = (isMeant) => {
      if (isOver) return;
      isOver = true;
      input.remove();
      this.onRename(conversation.id, isMeant ? input.value.trim() : conversation.title);
      this.list.querySelector("[aria-current]")?.focus();
    };
    input.value = titleOf(conversation);
    input.addEventListener("blur", () => leave(true));
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) leave(true);
      else if (event.key === "Escape") leave(false);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    item.replaceChildren(input);
    input.select();
  }
}
