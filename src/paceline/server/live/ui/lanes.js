// Batch rows: one lane per row, time to the right. What has happened is painted once, on a tape that only moves; a frame
// copies the part of it that can be seen and adds what goes on. So a frame costs the same for a thousand rows as for ten.

import { onTheme, palette } from "./colours.js";
import { BAND, DECODE, ENCODE, FINISH, FORK, PADDING, PLACED, PREFILL, REDO, VECTOR, counted } from "./stage.js";

const WINDOW_S = 20; // that can be seen, unless something else is chosen
export const DIGITS = 34; // pixels left of the lanes for their numbers
const MOST_HEIGHT = 18, LEAST_HEIGHT = 3, ROOM = 430;
const DIGIT = 7; // pixels, the height of a label's digits
const WORDS = { [BAND]: "has the row", [PREFILL]: "prompt", [REDO]: "recomputed", [DECODE]: "decode", [PADDING]: "padding", [PLACED]: "prompt", [ENCODE]: "a picture is encoded" };
const KINDS = [BAND, DECODE, PADDING, ENCODE, PLACED, PREFILL, REDO]; // in the order they are drawn

export class Lanes {
  // `gutterOf` says how many pixels of a width are left free for names; without it the lanes have numbers.
  constructor(canvas, stage, onPick, gutterOf = null) {
    this.gutterOf = gutterOf;
    this.canvas = canvas;
    this.scroll = canvas.parentElement;
    this.stage = stage;
    this.tape = document.createElement("canvas");
    this.labels = document.createElement("canvas");
    this.lanes = 0;
    this.now = 0;
    this.during(-Infinity, Infinity);
    onTheme(() => (this.lanes = 0));
    canvas.addEventListener("click", (event) => {
      const hit = this.at(event.offsetX, event.offsetY);
      if (hit) onPick?.(hit.request);
    });
    canvas.addEventListener("mousemove", (event) => {
      const hit = this.at(event.offsetX, event.offsetY);
      const click = onPick ? "; click for its story" : "";
      canvas.title = hit ? `row ${hit.row}, request ${hit.request}: ${WORDS[hit.kind]}${counted(hit)}${click}` : "";
    });
  }

  // The time to show: a run shorter than the window fills it, and any run does so from its beginning, from the left. In a
  // window without an end everything may be on the tape from the start, and is shown as far as `now`.
  during(first, last, windowS = WINDOW_S) {
    Object.assign(this, { first, last, whole: windowS === Infinity });
    this.windowS = Math.min(windowS, Math.max(0.1, last - first));
    this.lanes = 0; // everything is to be sized again
  }

  // Scrolls to a lane.
  reveal(row) {
    const top = row * this.height, room = this.scroll.clientHeight;
    if (top < this.scroll.scrollTop || top + this.height > this.scroll.scrollTop + room) {
      this.scroll.scrollTop = top - (room - this.height) / 2;
    }
  }

  // The time at the right edge.
  edge() {
    return Math.max(this.now, this.first + this.windowS);
  }

  // As many lanes as there ever were rows in use: lanes do not jump when one is left.
  fit(numSlots, now) {
    const lanes = Math.min(numSlots, Math.max(this.stage.mostRow + 1, 4)), scale = devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    if (lanes === this.lanes && width === this.width && scale === this.scale) return;
    Object.assign(this, { lanes, width, scale });
    this.height = Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, Math.floor(ROOM / lanes)));
    this.tall = Math.max(1, this.height - Math.min(3, this.height / 3));
    this.canvas.style.height = `${lanes * this.height}px`;
    this.gutter = this.gutterOf ? this.gutterOf(width) : DIGITS;
    this.span = Math.max(1, Math.floor((width - this.gutter) * scale)); // pixels
    this.rate = this.span / this.windowS; // of them for a second
    size(this.canvas, width * scale, lanes * this.height * scale);
    size(this.tape, 2 * this.span, lanes * this.height * scale);
    this.label();
    this.repaint(now);
  }

  label() {
    size(this.labels, this.gutter * this.scale, this.lanes * this.height * this.scale);
    if (this.gutterOf) return;
    const pen = this.labels.getContext("2d"), every = Math.max(1, Math.ceil(13 / this.height));
    pen.scale(this.scale, this.scale);
    pen.font = "10px system-ui";
    pen.fillStyle = palette().quiet;
    const highest = DIGIT + 2, lowest = this.lanes * this.height - 2;
    for (let lane = 0; lane < this.lanes; lane += every) {
      // In the middle of its lane, and whole where the lane is lower than a digit and at an edge.
      const bottom = lane * this.height + (this.tall + DIGIT) / 2;
      pen.fillText(String(lane), 2, Math.min(lowest, Math.max(highest, bottom)));
    }
  }

  // The whole tape again, from what is known: after a change of size, theme or place in time.
  repaint(now) {
    this.now = now;
    this.from = this.edge() - 1.5 * this.windowS; // the time at the tape's left end
    this.pen = this.tape.getContext("2d");
    this.pen.clearRect(0, 0, this.tape.width, this.tape.height);
    this.stage.takeUpdates();
    for (const segment of this.stage.segments) segment.painted = segment.from;
    this.paint(this.stage.segments, this.stage.marks, this.stage.snapshot.time_s);
    this.drawnAt = null;
  }

  // What has come since the last time goes onto the tape.
  commit() {
    if (!this.lanes) return;
    const updates = this.stage.takeUpdates(), until = this.stage.snapshot.time_s;
    if (this.x(until) > this.tape.width) this.shift(until);
    this.paint([...updates.ended, ...this.stage.active], updates.marks, until);
    this.drawnAt = null;
  }

  shift(until) {
    if (until - this.from > 3 * this.windowS) return this.repaint(until);
    const by = this.x(until) - this.span;
    this.pen.globalCompositeOperation = "copy";
    this.pen.drawImage(this.tape, -by, 0);
    this.pen.globalCompositeOperation = "source-over";
    this.from += by / this.rate;
  }

  // Whole pixels, so that what is painted piece by piece has no seams.
  x(time) {
    return Math.floor((time - this.from) * this.rate);
  }

  paint(segments, marks, until) {
    const colours = palette(), pen = this.pen, step = this.height * this.scale, tall = this.tall * this.scale;
    for (const kind of KINDS) {
      for (const segment of segments) {
        if (segment.kind !== kind) continue;
        const to = segment.to ?? until, from = this.x(segment.painted), end = this.x(to);
        const gap = segment.to !== null && !isDecode(kind) && end - from > 3 ? 1 : 0; // between parts of a prompt
        if (end > from || segment.painted === segment.from) {
          fill(pen, colours, segment, from, segment.row * step, Math.max(1, end - from - gap), tall);
        }
        segment.painted = Math.max(segment.painted, to);
      }
    }
    for (const mark of marks) {
      if (mark.kind === FORK) {
        this.join(mark);
        continue;
      }
      const wide = (mark.kind === FINISH || mark.kind === VECTOR ? 2 : 4) * this.scale, x = this.x(mark.at) - (mark.back ? 0 : wide);
      pen.fillStyle = colours[mark.kind];
      pen.fillRect(x, mark.row * step, mark.back ? 2 * this.scale : wide, step);
    }
  }

  // A line from the lane of a parent to that of its branch.
  join({ row, from, at }) {
    const step = this.height * this.scale, middle = (lane) => lane * step + (this.tall * this.scale) / 2;
    this.pen.fillStyle = palette().accent;
    this.pen.fillRect(this.x(at), middle(Math.min(row, from)), Math.round(2 * this.scale), Math.abs(middle(row) - middle(from)));
  }

  // `ghost`: how much is seen of what comes after `now`, from 0 to 1.
  draw(now, numSlots, ghost = 0) {
    this.now = now;
    this.fit(numSlots, now);
    // A frame in which nothing would move by a pixel is not drawn: the time between two of them is that of others.
    const at = this.stage.segments.length ? `${this.x(now)} ${this.scroll.scrollTop} ${ghost}` : "empty";
    if (at === this.drawnAt) return;
    this.drawnAt = at;
    const pen = this.canvas.getContext("2d"), scale = this.scale, left = this.canvas.width - this.span;
    // Only what can be seen of a tall canvas.
    const top = Math.floor(this.scroll.scrollTop * scale), high = Math.ceil(this.scroll.clientHeight * scale) + 1;
    pen.clearRect(0, top, this.canvas.width, high);
    pen.imageSmoothingEnabled = false;
    this.rule(pen, left, top, high);
    const from = this.x(this.edge() - this.windowS), cut = Math.max(0, -from);
    const copy = (start, end) => {
      if (end > start) pen.drawImage(this.tape, from + start, top, end - start, high, left + start, top, end - start, high);
    };
    const seen = this.whole ? Math.min(this.span, this.x(now) - from) : this.span;
    copy(cut, seen);
    pen.globalAlpha = ghost;
    if (ghost) copy(Math.max(cut, seen), this.span);
    pen.globalAlpha = 1;
    this.goOn(pen, left - from, top, high);
    pen.clearRect(0, top, left, high);
    if (!this.gutterOf) pen.drawImage(this.labels, 0, top, left, high, 0, top, left, high);
  }

  // What goes on now, from where the tape ends.
  goOn(pen, offset, top, high) {
    const colours = palette(), step = this.height * this.scale, tall = this.tall * this.scale, end = this.x(this.now);
    const seen = [];
    for (const segment of this.stage.active) {
      const y = segment.row * step;
      if (y + step >= top && y <= top + high) seen.push(segment);
    }
    for (const kind of KINDS) {
      for (const segment of seen) {
        if (segment.kind !== kind) continue;
        const from = this.x(segment.painted);
        if (end > from) fill(pen, colours, segment, from + offset, segment.row * step, end - from, tall);
      }
    }
  }

  rule(pen, left, top, high) {
    const every = this.height >= 6 ? 1 : 8, step = every * this.height * this.scale;
    pen.fillStyle = palette().line;
    for (let y = Math.max(1, Math.floor(top / step)) * step - 1; y < top + high; y += step) {
      pen.fillRect(left, y, this.canvas.width, 1);
    }
  }

  // The segment at a place of the canvas, or the last of its lane.
  at(x, y) {
    if (!this.lanes) return null;
    const lane = Math.floor(y / this.height), time = this.edge() - ((this.width - x) * this.scale) / this.rate;
    const inLane = this.stage.segments.filter((segment) => segment.row === lane);
    const under = inLane.filter((segment) => segment.from <= time && time <= (segment.to ?? this.now));
    return under.findLast((segment) => segment.kind !== BAND) || under.at(-1) || inLane.at(-1) || null;
  }
}

const isDecode = (kind) => kind === DECODE || kind === PADDING;

// A prompt that is padded to its batch is grey in its lower part, as much of it as is padding; one that has contexts has
// their colour there, as much of it as is copied and not computed.
function fill(pen, colours, { kind, padded, placed }, x, y, wide, tall) {
  pen.fillStyle = colours[kind];
  pen.fillRect(x, y, wide, tall);
  const share = placed || padded;
  if (!share || kind === PADDING) return;
  const part = Math.max(1, Math.min(tall - 1, Math.round(tall * share)));
  pen.fillStyle = colours[placed ? PLACED : PADDING];
  pen.fillRect(x, y + tall - part, wide, part);
}

function size(canvas, width, height) {
  canvas.width = Math.max(1, Math.round(width));
  canvas.height = Math.max(1, Math.round(height));
}
