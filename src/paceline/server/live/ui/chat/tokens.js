// A text as it was spelled, its tokens coloured by how likely they were, those that came as drafts underlined. The one
// under the pointer, or the one that the arrow keys have reached, shows what else was likely at its place.

import { byId, element } from "../dom.js";

const SHADES = [0.9, 0.6, 0.3, 0.1]; // from this probability on; the rest is the fifth

export class TokenText {
  constructor(place) {
    this.place = place;
    this.reset();
    const nearest = (event) => event.target.closest?.("[data-at]");
    place.addEventListener("pointerover", (event) => this.point(nearest(event)));
    place.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && this.point(null)); // a finger leaves at once
    place.addEventListener("blur", () => this.point(null));
    place.addEventListener("keydown", (event) => this.pressed(event));
  }

  // The whole text. Tokens that are no part of it, such as markers, are passed over, and what no token is known of is
  // plain.
  show(text, tokens = []) {
    if (!text.startsWith(this.text) || tokens.length < this.tokens) this.reset();
    this.text = text;
    this.known = tokens;
    this.rest.remove();
    for (; this.tokens < tokens.length; this.tokens++) {
      const [spelled, logprob, , isDrafted] = tokens[this.tokens];
      if (!spelled || !text.startsWith(spelled, this.at)) continue;
      this.at += spelled.length;
      if (logprob === null) {
        this.place.append(spelled); // it was put in, or is from before a fork
        continue;
      }
      this.place.append(element("span", { class: `token shade-${shade(logprob)}${isDrafted ? " drafted" : ""}`, "data-at": String(this.tokens), text: spelled }));
    }
    this.rest.textContent = text.slice(this.at);
    this.place.append(this.rest);
    if (this.at) this.place.tabIndex = 0;
  }

  reset() {
    Object.assign(this, { text: "", tokens: 0, at: 0, known: [], pointed: null, rest: document.createTextNode("") });
    this.place.replaceChildren(this.rest);
  }

  pressed(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    this.point(this.pointed?.[step] ?? this.pointed ?? this.place.firstElementChild);
  }

  point(token) {
    this.pointed?.classList.remove("pointed");
    this.pointed = token ?? null;
    const shown = byId("alternatives");
    shown.hidden = !token;
    if (!token) return;
    token.classList.add("pointed");
    const [spelled, logprob, top, isDrafted] = this.known[Number(token.dataset.at)], same = top.filter(([, value]) => value === logprob);
    const chosen = same.find(([text]) => text === spelled) ?? same[0] ?? [spelled, logprob];
    const rows = same.length ? top : [...top, chosen];
    shown.replaceChildren(...rows.map((each) => row(each, each === chosen)));
    if (isDrafted) shown.append(element("p", { text: "came as a draft" }));
    const { left, top: above, bottom } = [...token.getClientRects()].at(-1), { width, height } = shown.getBoundingClientRect();
    shown.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    shown.style.top = `${bottom + height + 12 < innerHeight ? bottom + 6 : Math.max(8, above - height - 6)}px`;
  }
}

function shade(logprob) {
  const at = SHADES.findIndex((least) => Math.exp(logprob) >= least);
  return at < 0 ? SHADES.length : at;
}

function row([text, logprob], isChosen) {
  const chance = Math.exp(logprob), bar = element("i");
  bar.style.width = `${100 * chance}%`;
  const percent = chance >= 0.001 ? `${(100 * chance).toFixed(1)} %` : "< 0.1 %";
  const shown = text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return element("div", { class: isChosen ? "chosen" : null }, element("code", { text: shown }), element("span", { class: "bar" }, bar), element("span", { text: percent }));
}
