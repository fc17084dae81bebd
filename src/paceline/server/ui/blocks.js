// The block map: every block of the KV cache as one cell. Two bits a block come in; see serving/sight.py.

import { palette } from "./lanes.js";

const KINDS = ["free", "cached", "held", "shared"];

export function unpack(text, count) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const kinds = new Uint8Array(count);
  for (let block = 0; block < count; block++) kinds[block] = (bytes[block >> 2] >> ((block & 3) * 2)) & 3;
  return kinds;
}

export class BlockMap {
  constructor(canvas, note) {
    this.canvas = canvas;
    this.note = note;
    this.counts = {};
  }

  draw(scene) {
    const groups = scene.blocks.map((text, index) => unpack(text, scene.num_blocks[index]));
    const total = groups.reduce((sum, kinds) => sum + kinds.length, 0);
    const width = this.canvas.clientWidth, room = 300, scale = devicePixelRatio || 1;
    const side = Math.max(1, Math.min(12, Math.floor(Math.sqrt((width * room) / Math.max(1, total)))));
    const across = Math.max(1, Math.floor(width / side));
    const lines = groups.reduce((sum, kinds) => sum + Math.ceil(kinds.length / across), groups.length - 1);
    const height = Math.max(side, lines * side);
    if (this.canvas.width !== width * scale || this.canvas.height !== height * scale) {
      this.canvas.width = width * scale;
      this.canvas.height = height * scale;
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d"), colours = palette(this.canvas), gap = side > 3 ? 1 : 0;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const counts = [0, 0, 0, 0];
    let top = 0;
    for (const kinds of groups) {
      for (let kind = 0; kind < 4; kind++) {
        pen.fillStyle = colours[KINDS[kind]];
        for (let block = 0; block < kinds.length; block++) {
          if (kinds[block] !== kind) continue;
          counts[kind] += 1;
          pen.fillRect((block % across) * side, top + Math.floor(block / across) * side, side - gap, side - gap);
        }
      }
      top += (Math.ceil(kinds.length / across) + 1) * side;
    }
    this.counts = Object.fromEntries(KINDS.map((name, kind) => [name, counts[kind]]));
    this.note.textContent =
      `${counts[2] + counts[3]} of ${total} held, ${counts[3]} by more than one request; ` +
      `${counts[1]} free ones still hold a prefix; ${scene.evicted} prefixes given up`;
  }
}
