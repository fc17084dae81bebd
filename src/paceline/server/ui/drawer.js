// One request: its way over the last minute as a waterfall, and its story in the engine's own sentences.

import { ask } from "./feed.js";
import { palette } from "./lanes.js";

export class Drawer {
  constructor(place, stage) {
    this.place = place;
    this.stage = stage;
    this.request = null;
    [this.title, this.line, this.story] = ["title", "line", "story"].map((name) => place.querySelector(`#drawer-${name}`));
    place.querySelector("#drawer-close").addEventListener("click", () => this.close());
    addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  close() {
    this.place.hidden = true;
    this.request = null;
  }

  async show(request) {
    this.request = request;
    this.place.hidden = false;
    this.title.textContent = `Request ${request}`;
    this.story.replaceChildren(item("…"));
    this.draw();
    try {
      const told = await ask(`/v1/admin/requests/${request}/explain`);
      if (this.request !== request) return;
      if (told.id) this.title.textContent = `Request ${request} · ${told.id}`;
      this.story.replaceChildren(...told.branches.flatMap((branch) => branch.sentences.map((sentence) => item(sentence))));
    } catch (error) {
      this.story.replaceChildren(item(error.message));
    }
  }

  draw() {
    if (this.request === null) return;
    const parts = this.stage.segments.filter((segment) => segment.request === this.request);
    const marks = this.stage.marks.filter((mark) => mark.request === this.request);
    const now = this.stage.scene.time_s, width = this.line.clientWidth, scale = devicePixelRatio || 1;
    const from = Math.min(now, ...parts.map((part) => part.from)), to = Math.max(from + 0.1, ...parts.map((part) => part.to ?? now));
    this.line.width = width * scale;
    this.line.height = 40 * scale;
    const pen = this.line.getContext("2d"), colours = palette(this.line);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const x = (time) => ((time - from) / (to - from)) * width;
    for (const part of parts) {
      pen.fillStyle = colours[part.kind];
      pen.fillRect(x(part.from), 6, Math.max(1, x(part.to ?? now) - x(part.from) - 1), 20);
    }
    for (const mark of marks) {
      pen.fillStyle = colours[mark.kind];
      pen.fillRect(x(mark.at) - 1, 2, 3, 28);
    }
    pen.fillStyle = colours.quiet;
    pen.font = "10px system-ui";
    pen.fillText(`${(to - from).toFixed(2)} s`, 2, 38);
  }
}

function item(text) {
  const line = document.createElement("li");
  line.textContent = text;
  return line;
}
