// The block map: every block of the KV cache as one cell. Two bits a block come in; see process/live_view.py. Only cells that
// changed are drawn. A block whose prefix was evicted is framed for a moment.

import { onTheme, palette } from "./colours.js";

const KINDS = ["free", "cached", "held", "shared"], ROOM = 300, MOST_SIDE = 12, FLASH_MS = 1200;

export function unpack(text, count) {
  const packed = atob(text), kinds = new Uint8Array(count);
  for (let block = 0; block < count; block++) kinds[block] = (packed.charCodeAt(block >> 2) >> ((block & 3) * 2)) & 3;
  return kinds;
}

export class BlockMap {
  constructor(canvas, note) {
    this.canvas = canvas;
    this.note = note;
    this.counts = {};
    this.evicted = new Map(); // "group:block" -> when its frame goes
    this.reset();
    onTheme(() => this.reset());
  }

  reset() {
    this.drawn = null; // kinds by group, as they are on the canvas
  }

  flash(evicted) {
    const until = performance.now() + FLASH_MS;
    evicted?.forEach((blocks, group) => blocks.forEach((block) => this.evicted.set(`${group}:${block}`, until)));
  }

  fit(counts) {
    const total = counts.reduce((sum, count) => sum + count, 0), width = this.canvas.clientWidth, scale = devicePixelRatio || 1;
    const same = this.drawn && width === this.width && scale === this.scale && String(counts) === String(this.sizes);
    if (same) return;
    Object.assign(this, { width, scale, sizes: counts, total });
    this.side = Math.max(1, Math.min(MOST_SIDE, Math.floor(Math.sqrt((width * ROOM) / Math.max(1, total)))));
    this.across = Math.max(1, Math.floor(width / this.side));
    this.tops = [];
    let line = 0;
    for (const count of counts) {
      this.tops.push(line);
      line += Math.ceil(count / this.across) + 1;
    }
    const height = Math.max(1, line - 1) * this.side;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.canvas.getContext("2d").scale(scale, scale);
    this.drawn = counts.map((count) => new Uint8Array(count).fill(255));
  }

  draw(snapshot) {
    const groups = snapshot.blocks.map((text, index) => unpack(text, snapshot.num_blocks[index]));
    this.fit(snapshot.num_blocks);
    const pen = this.canvas.getContext("2d"), colours = palette(), counts = [0, 0, 0, 0], now = performance.now();
    for (const [key, until] of this.evicted) {
      const [group, block] = key.split(":").map(Number);
      if (this.drawn[group]) this.drawn[group][block] = 254; // to be drawn again, framed or not
      if (until < now) this.evicted.delete(key);
    }
    groups.forEach((kinds, group) => {
      const drawn = this.drawn[group];
      for (let block = 0; block < kinds.length; block++) {
        counts[kinds[block]] += 1;
        if (kinds[block] === drawn[block]) continue;
        this.cell(pen, group, block, colours[KINDS[kinds[block]]], drawn[block] === 254 && this.evicted.has(`${group}:${block}`));
        drawn[block] = kinds[block];
      }
    });
    this.counts = Object.fromEntries(KINDS.map((name, kind) => [name, counts[kind]]));
    const number = (value) => value.toLocaleString("en"), sizes = snapshot.num_blocks;
    const alike = sizes.length > 1 && sizes.every((size) => size === sizes[0]); // layers of two kinds have a cache each
    const all = alike ? `${sizes.length} × ${number(sizes[0])}` : number(this.total);
    this.note.textContent =
      `${number(counts[2] + counts[3])} of ${all} held, ${number(counts[3])} shared (which saves ${number(snapshot.saved)}); ` +
      `${number(counts[1])} free ones still hold a prefix; ${number(snapshot.evicted)} prefixes evicted`;
  }

  cell(pen, group, block, colour, framed) {
    const side = this.side, x = (block % this.across) * side, y = (this.tops[group] + Math.floor(block / this.across)) * side;
    const edge = side > 3 ? 1 : 0;
    pen.fillStyle = framed ? palette().evicted : colour;
    pen.fillRect(x, y, side - edge, side - edge);
    if (framed && side > 5) {
      pen.fillStyle = colour;
      pen.fillRect(x + 2, y + 2, side - edge - 4, side - edge - 4);
    }
  }
}
