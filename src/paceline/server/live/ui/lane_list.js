// The rows of the batch as a list beside their lanes: the name of the request on each, for eyes and for the keyboard. One
// entry can be reached with Tab, the others from it with the arrow keys; Enter opens the request.

const READABLE = 11; // pixels: text in lower lanes is spoken, not shown

export class LaneList {
  constructor(place, lanes, stage, names, onPick) {
    Object.assign(this, { place, lanes, stage, names, at: 0, shown: null });
    place.addEventListener("click", (event) => {
      const entry = event.target.closest("button");
      if (entry?.dataset.request) onPick(Number(entry.dataset.request));
    });
    place.addEventListener("focusin", (event) => this.reach([...place.children].indexOf(event.target)));
    place.addEventListener("keydown", (event) => {
      const last = place.children.length - 1;
      const to = { ArrowDown: Math.min(last, this.at + 1), ArrowUp: Math.max(0, this.at - 1), Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      place.children[to].focus();
    });
  }

  // The entry that Tab leads to.
  reach(row) {
    if (row < 0) return;
    this.place.children[this.at]?.setAttribute("tabindex", "-1");
    this.at = row;
    this.place.children[row]?.setAttribute("tabindex", "0");
  }

  // `open` is the request whose story is shown, or null.
  draw(open) {
    const { lanes: count, height, gutter } = this.lanes, place = this.place;
    place.style.width = `${gutter - 4}px`;
    place.style.setProperty("--row", `${height}px`);
    place.classList.toggle("small", height < READABLE);
    while (place.children.length > count) place.lastChild.remove();
    while (place.children.length < count) {
      const entry = document.createElement("button");
      entry.type = "button";
      entry.setAttribute("tabindex", "-1");
      place.append(entry);
    }
    this.reach(Math.min(this.at, count - 1));
    const tenants = this.tenants(), oldest = this.lanes.edge() - this.lanes.windowS;
    for (let row = 0; row < count; row++) {
      const last = this.stage.latest.get(row), seen = last && (last.left === null || last.left > oldest) ? last : null;
      this.write(place.children[row], row, seen, seen ? this.names.label(seen.request, tenants.get(seen.request)) : "", open);
    }
  }

  write(entry, row, seen, name, open) {
    const text = name || `row ${row}`, state = !seen ? "free" : seen.left === null ? "running" : "over";
    if (entry.textContent !== text) {
      entry.textContent = text;
      entry.title = seen ? `row ${row}, request ${name}` : `row ${row}, free`;
      entry.setAttribute("aria-label", entry.title);
      entry.dataset.request = seen?.request ?? "";
    }
    if (entry.dataset.state !== state) entry.dataset.state = state;
    const isOpen = Boolean(seen) && this.names.firstOf(seen.request) === open;
    if (isOpen !== entry.classList.contains("open")) entry.classList.toggle("open", isOpen);
  }

  // Of requests on rows, where there are several tenants.
  tenants() {
    const { rows, columns, tenants, tenant_of: which } = this.stage.snapshot, found = new Map();
    if (tenants.length > 1) rows[columns.indexOf("request")].forEach((request, at) => found.set(request, tenants[which[at]]));
    return found;
  }
}
