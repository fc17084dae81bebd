// Conversations in the browser's storage, an entry for each. Without a storage, or when it is full, the page goes on with
// what it has in memory and says so.

import { interrupted, restored } from "./conversation.js";

const PREFIX = "paceline-chat:";

export class Store {
  // `onProblem` gets a sentence, or null when there is none any more; `onChange` what another tab has changed.
  constructor(onProblem, onChange) {
    Object.assign(this, { onProblem, storage: opened() });
    if (!this.storage) onProblem("This browser gives the page no storage: conversations are lost when the page is closed.");
    addEventListener("storage", (event) => {
      if (!event.key?.startsWith(PREFIX)) return;
      onChange(event.key.slice(PREFIX.length), event.newValue === null ? null : read(event.newValue));
    });
  }

  all() {
    const keys = this.storage ? Object.keys(this.storage).filter((key) => key.startsWith(PREFIX)) : [];
    const found = keys.map((key) => read(this.storage.getItem(key))).filter((each) => each !== null).map(interrupted);
    return found.sort((a, b) => b.updated - a.updated);
  }

  save(conversation) {
    if (!this.storage) return;
    try {
      this.storage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      this.report(null);
    } catch {
      this.report("The browser's storage is full: new messages are lost when the page is closed. Delete conversations to make room.");
    }
  }

  remove(id) {
    this.storage?.removeItem(PREFIX + id);
    if (this.problem) this.report(null);
  }

  report(problem) {
    if (problem === (this.problem ?? null)) return;
    this.problem = problem;
    this.onProblem(problem);
  }
}

function opened() {
  try {
    localStorage.setItem(`${PREFIX}?`, "");
    localStorage.removeItem(`${PREFIX}?`);
    return localStorage;
  } catch (error) {
    return error.name === "QuotaExceededError" ? localStorage : null;
  }
}

function read(text) {
  try {
    return restored(JSON.parse(text));
  } catch {
    return null;
  }
}
