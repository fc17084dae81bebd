// Parts of a request's way that are too old for the pictures, for its waterfall: of requests that are still here, and of
// the one that is shown, for as long as it is.

export class Past {
  constructor() {
    this.shown = null; // a request
    this.reset();
  }

  reset() {
    this.parts = new Map(); // request -> segments that have ended, in order
  }

  of(request) {
    return this.parts.get(request) ?? [];
  }

  // `segments` leave the pictures. `isHere` says of a request whether there may be more of it.
  take(segments, isHere) {
    for (const segment of segments) {
      if (segment.request !== this.shown && !isHere(segment.request)) continue;
      if (!this.parts.has(segment.request)) this.parts.set(segment.request, []);
      this.parts.get(segment.request).push(segment);
    }
  }

  // What ended before the pictures begin, and is not shown.
  forget(isHere, before) {
    for (const [request, parts] of this.parts) {
      if (request !== this.shown && !isHere(request) && parts.at(-1).to <= before) this.parts.delete(request);
    }
  }
}
