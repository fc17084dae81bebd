// The server: which model it serves, whether it can be reached, and whether it wants another key.

import { ask, keyring } from "../feed.js";

const AGAIN_MS = 1000, LONGEST_MS = 8000;

export class Server {
  // `onState` gets "ready", "key", "starting" or "lost", with a sentence.
  constructor(onState) {
    Object.assign(this, { onState, state: "waiting", model: "", card: {}, trying: null });
  }

  // Asks until there is an answer to go by; a caller that asks meanwhile waits for the same.
  connect() {
    this.trying ??= this.try().finally(() => (this.trying = null));
    return this.trying;
  }

  async try() {
    for (let pause = AGAIN_MS; ; pause = Math.min(2 * pause, LONGEST_MS)) {
      try {
        this.card = (await ask("/v1/models")).data[0];
        this.model = this.card.id;
        return this.setStatus("ready", "");
      } catch (error) {
        if (error.status === 401 && !keyring.get()) return this.setStatus("key", "");
        if (error.status === 401) return this.setStatus("key", "The key is wrong.");
        if (error.status === 403) return this.setStatus("key", error.message);
        if (error.status === 503) {
          this.setStatus("starting", error.message);
          pause = AGAIN_MS;
        } else this.setStatus("lost", "The server does not answer.");
      }
      await new Promise((wake) => setTimeout(wake, pause));
    }
  }

  useKey(key) {
    keyring.set(key);
    return this.connect();
  }

  setStatus(state, note) {
    this.state = state;
    this.onState(state, note);
  }
}
