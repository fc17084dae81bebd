// Requests that wait, in the policy's order: a bar each, as long as it has waited. Preempted ones have the colour of how.

import { palette } from "./colours.js";

const SHOWN = 8, HEIGHT = 16, LABEL = 190, LONGEST = 24;

export class Queue {
  constructor(canvas, note, stage, names, onPick) {
    Object.assign(this, { canvas, note, stage, names });
    this.shown = [];
    canvas.addEventListener("click", (event) => {
      const waiting = this.shown[Math.floor(event.offsetY / HEIGHT)];
      if (waiting) onPick(waiting[0]);
    });
  }

  draw(now) {
    const snapshot = this.stage.snapshot, scale = devicePixelRatio || 1, width = this.canvas.clientWidth;
    this.shown = snapshot.waiting.slice(0, SHOWN);
    const more = snapshot.num_waiting - this.shown.length;
    this.note.textContent = snapshot.num_waiting ? (more > 0 ? `and ${more.toLocaleString("en")} more wait` : "") : "No request waits.";
    this.canvas.style.height = `${this.shown.length * HEIGHT}px`;
    this.canvas.width = width * scale;
    this.canvas.height = this.shown.length * HEIGHT * scale;
    const pen = this.canvas.getContext("2d"), colours = palette();
    pen.scale(scale, scale);
    pen.font = "10px system-ui";
    const bars = this.shown.map(([request, arrival, tokens, preemptions, , swapped]) => {
      const gone = this.stage.gone.get(request), kind = gone?.kind ?? (swapped ? "swap" : preemptions ? "recompute" : "quiet");
      return { request, tokens, kind, waited: Math.max(0, now - (gone?.at ?? arrival)) };
    });
    const longest = Math.max(1, ...bars.map((bar) => bar.waited)), room = Math.max(20, width - LABEL - 50);
    bars.forEach((bar, index) => {
      const y = index * HEIGHT, long = Math.max(2, (bar.waited / longest) * room);
      pen.fillStyle = colours.ink;
      pen.fillText(`${this.names.shortLabel(bar.request, LONGEST)}, ${bar.tokens.toLocaleString("en")} tokens`, 2, y + 11, LABEL - 8);
      pen.fillStyle = colours[bar.kind];
      pen.fillRect(LABEL, y + 3, long, HEIGHT - 6);
      pen.fillStyle = colours.quiet;
      pen.fillText(`${bar.waited.toFixed(1)} s`, LABEL + long + 5, y + 11);
    });
  }
}
