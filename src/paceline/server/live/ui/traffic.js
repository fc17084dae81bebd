// Traffic from the page itself: one request to the server, which holds as many conversations as are asked for and streams
// the chunks of all of them.

import { events, headers } from "./feed.js";

export class Traffic {
  constructor(form, note, answers, path) {
    Object.assign(this, { form, note, answers, path, going: null, ended: 0 });
    this.stop = form.querySelector("#traffic-stop");
    this.stop.addEventListener("click", () => this.going?.abort());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const message = form.querySelector("textarea").value.trim(), count = Number(form.querySelector("input").value);
      if (message && count) this.send(message, count);
    });
  }

  async send(message, count) {
    this.going?.abort();
    const going = (this.going = new AbortController());
    this.places = new Map(); // id -> where its answer is written
    this.ended = 0;
    this.answers.replaceChildren();
    this.stop.hidden = false;
    this.note.className = "quiet";
    try {
      const answer = await fetch(this.path, {
        method: "POST",
        headers: { "content-type": "application/json", ...headers() },
        body: JSON.stringify({ message, count }),
        signal: going.signal,
      });
      if (!answer.ok) throw new Error((await answer.json()).error?.message || answer.statusText);
      for await (const chunk of events(answer.body)) if (this.going === going) this.take(chunk);
    } catch (error) {
      if (this.going === going && error.name !== "AbortError") {
        this.note.textContent = error.message;
        this.note.className = "problem";
      }
    }
    if (this.going !== going) return;
    this.going = null;
    this.stop.hidden = true;
    if (going.signal.aborted) this.note.textContent = `stopped; ${this.ended} of ${this.places.size} had ended`;
  }

  take(chunk) {
    for (const id of chunk.ids ?? []) this.open(id);
    const text = this.places.get(chunk.id), choice = chunk.choices?.[0];
    if (text && chunk.error) text.textContent += ` [${chunk.error.message}]`;
    if (text) text.textContent += choice?.delta?.content ?? "";
    if (chunk.error || choice?.finish_reason) this.ended += 1;
    this.note.textContent = `${this.places.size} sent, ${this.ended} ended`;
  }

  open(id) {
    const place = document.createElement("p"), link = document.createElement("a"), text = document.createElement("span");
    link.href = `#request=${encodeURIComponent(id)}`;
    link.textContent = id.slice(0, 17);
    place.append(link, text);
    this.answers.append(place);
    this.places.set(id, text);
  }
}
