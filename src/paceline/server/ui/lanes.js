// The line: one lane per row, time to the right. Reads the stage and the colours of the page; knows no messages.

import { DECODE, FINISH, PREFILL, RECOMPUTE, SWAP } from "./stage.js";

const WINDOW_S = 20, LABEL = 34, MOST_HEIGHT = 18, LEAST_HEIGHT = 3;

export class Lanes {
  constructor(canvas, stage, onPick) {
    this.canvas = canvas;
    this.stage = stage;
    this.lanes = 1;
    canvas.addEventListener("click", (event) => {
      const request = this.at(event.offsetX, event.offsetY);
      if (request !== null) onPick(request);
    });
  }

  // As many lanes as there ever were rows in use: lanes do not jump when one is left.
  fit(numSlots) {
    const used = Math.max(0, ...this.stage.rows.keys(), ...this.stage.segments.map((segment) => segment.row)) + 1;
    this.lanes = Math.min(numSlots, Math.max(this.lanes, used, 4));
    this.height = Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, Math.floor(420 / this.lanes)));
    const scale = devicePixelRatio || 1, width = this.canvas.clientWidth, height = this.lanes * this.height + 4;
    if (this.canvas.width !== width * scale || this.canvas.height !== height * scale) {
      this.canvas.width = width * scale;
      this.canvas.height = height * scale;
      this.canvas.style.height = `${height}px`;
    }
    this.width = width;
    return scale;
  }

  x(time) {
    return LABEL + (this.width - LABEL) * (1 - (this.now - time) / WINDOW_S);
  }

  draw(now, numSlots) {
    const scale = this.fit(numSlots), pen = this.canvas.getContext("2d");
    this.now = now;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.lanes * this.height + 4);
    const colours = palette(this.canvas), tall = Math.max(1, this.height - Math.min(3, this.height / 3));
    pen.font = "10px system-ui";
    pen.fillStyle = colours.line;
    for (let lane = 0; lane < this.lanes; lane++) {
      if (this.height >= 6 || lane % 8 === 0) pen.fillRect(LABEL, lane * this.height + tall, this.width - LABEL, 0.5);
    }
    pen.fillStyle = colours.quiet;
    const every = Math.max(1, Math.ceil(12 / this.height));
    for (let lane = 0; lane < this.lanes; lane += every) pen.fillText(String(lane), 2, lane * this.height + Math.min(tall, 10));
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, this.width - LABEL, this.lanes * this.height + 4);
    pen.clip();
    for (const kind of [DECODE, PREFILL]) {
      pen.fillStyle = colours[kind];
      for (const segment of this.stage.segments) {
        if (segment.kind !== kind) continue;
        const from = this.x(segment.from), to = this.x(segment.to ?? now);
        if (to >= LABEL) pen.fillRect(from, segment.row * this.height, Math.max(1, to - from - 0.5), tall);
      }
    }
    for (const mark of this.stage.marks) {
      pen.fillStyle = colours[mark.kind];
      const wide = mark.kind === FINISH ? 2 : 3;
      pen.fillRect(this.x(mark.at) - wide / 2, mark.row * this.height - 1, wide, tall + 2);
    }
    pen.restore();
  }

  // The request whose lane is at a place of the canvas, or null.
  at(x, y) {
    const lane = Math.floor(y / this.height), time = this.now - (1 - (x - LABEL) / (this.width - LABEL)) * WINDOW_S;
    const inLane = this.stage.segments.filter((segment) => segment.row === lane);
    const hit = inLane.findLast((segment) => segment.from <= time && time <= (segment.to ?? this.now));
    return (hit || inLane.at(-1))?.request ?? null;
  }
}

const NAMES = ["line", "quiet", "ink", "accent", PREFILL, DECODE, RECOMPUTE, SWAP, FINISH, "held", "shared", "cached", "free", "panel"];

export function palette(element) {
  const style = getComputedStyle(element);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`)]));
}
