// One route: its fields, an example of a request and its answers, and on demand a form that sends a request.

import { curl } from "./curl.js";
import { copyButton, element } from "../dom.js";
import { TryIt } from "./try.js";

const UNBOUNDED = 2 ** 31 - 1; // a limit from here on is that of the number's type
const ANSWERS = [
  ["Answer", "200", "application/json"],
  ["Stream", "200", "text/event-stream"],
  ["File", "200", "application/octet-stream"],
  ["Error", "default", "application/json"],
];

export class Operation {
  constructor(method, path, described, model) {
    Object.assign(this, { method, path, described });
    const content = described.requestBody?.content ?? {};
    this.json = content["application/json"];
    this.form = content["multipart/form-data"];
    this.streams = Boolean(described.responses["200"]?.content?.["text/event-stream"]);
    this.example = withModel(this.json?.example, model);
    this.id = `${method}${path}`.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/-$/, "");
    this.rows = this.fieldRows();
    this.words = `${method} ${path} ${described.summary ?? ""} ${described.description ?? ""}`.toLowerCase();
    this.place = element("article", { id: this.id }, this.title(), ...this.body());
    this.link = element("a", { href: `#${this.id}` }, verb(method), element("span", { className: "path", text: path }));
  }

  title() {
    const link = element("a", { href: `#${this.id}`, className: "path", text: this.path });
    return element("h3", {}, verb(this.method), link);
  }

  body() {
    const found = [element("p", { text: [this.described.summary, this.described.description].filter(Boolean).join(". ") })];
    const columns = element("div", { className: "columns" });
    if (this.rows.length) columns.append(this.fields());
    else columns.classList.add("single");
    columns.append(this.examples());
    return [...found, columns];
  }

  fields() {
    const head = element("tr", {}, ...["Field", "Type", "Meaning"].map((text) => element("th", { text })));
    return element("table", { className: "fields" }, element("thead", {}, head), element("tbody", {}, ...this.rows.map((row) => row.place)));
  }

  fieldRows() {
    const schema = (this.json ?? this.form)?.schema ?? {}, required = new Set(schema.required ?? []);
    const fields = Object.entries(schema.properties ?? {}).sort(([one], [other]) => required.has(other) - required.has(one));
    return fields.map(([name, entry]) => {
      const first = element("td", {}, element("code", { text: name }));
      if (required.has(name)) first.append(element("b", { text: " required" }));
      const meaning = [entry.description, limits(entry)].filter(Boolean).join("; ");
      const place = element("tr", {}, first, element("td", { text: kindOf(entry) }), element("td", { text: meaning }));
      return { place, words: `${name} ${meaning}`.toLowerCase() };
    });
  }

  examples() {
    const place = element("div", { className: "examples" });
    const request = curl({ method: this.method, path: this.path, body: this.example, form: this.form !== undefined });
    const opener = element("button", { type: "button", text: "Try it" });
    const bar = element("div", { className: "bar" }, element("span", { className: "quiet", text: "Request" }), copyButton(() => request, { class: "plain" }), opener);
    const shown = element("div", {}, bar, element("pre", { text: request }), ...this.answers());
    place.append(shown);
    opener.addEventListener("click", () => {
      shown.hidden = true;
      const form = new TryIt(this, () => {
        form.place.remove();
        shown.hidden = false;
      });
      place.append(form.place);
      form.focus();
    });
    return place;
  }

  answers() {
    const { responses } = this.described;
    const found = ANSWERS.map(([name, status, media]) => [name, responses[status]?.content?.[media]?.example]).filter(([, value]) => value !== undefined);
    if (!found.length) return [];
    const text = element("pre"), buttons = found.map(([name]) => element("button", { type: "button", className: "plain", text: name }));
    const choose = (chosen) => {
      const value = found[chosen][1];
      text.textContent = typeof value === "string" ? value : JSON.stringify(value, null, 2);
      buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(index === chosen)));
    };
    buttons.forEach((button, index) => button.addEventListener("click", () => choose(index)));
    choose(0);
    return [element("div", { className: "bar" }, element("span", { className: "quiet", text: "Example of an answer" }), ...buttons), text];
  }

  // Every word must be in the route or in one of its fields; fields with a word are marked.
  match(words) {
    const isHit = words.every((word) => this.words.includes(word) || this.rows.some((row) => row.words.includes(word)));
    const wanted = words.filter((word) => !this.words.includes(word));
    for (const row of this.rows) row.place.classList.toggle("hit", isHit && wanted.some((word) => row.words.includes(word)));
    this.place.hidden = this.link.hidden = !isHit;
    return isHit;
  }
}

function verb(method) {
  const place = element("span", { className: "verb", text: method.toUpperCase() });
  place.dataset.verb = method;
  return place;
}

function withModel(example, model) {
  return example && model && "model" in example ? { ...example, model } : example;
}

function kindOf(entry) {
  const others = entry.anyOf ?? entry.oneOf;
  if (others) return [...new Set(others.map(kindOf))].join(" or ");
  return [entry.type ?? "any"].flat().join(" or ");
}

function limits(entry) {
  const said = (each) => each.enum || each.minimum !== undefined || each.exclusiveMinimum !== undefined || each.maximum !== undefined;
  const found = (entry.anyOf ?? entry.oneOf ?? [entry]).find(said);
  if (!found) return "";
  if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(", ");
  const isBound = (value) => value !== undefined && Math.abs(value) < UNBOUNDED;
  const low = isBound(found.exclusiveMinimum) ? `above ${found.exclusiveMinimum}` : isBound(found.minimum) ? `at least ${found.minimum}` : "";
  const high = isBound(found.maximum) ? `at most ${found.maximum}` : "";
  if (isBound(found.minimum) && high) return `${found.minimum} to ${found.maximum}`;
  return [low, high].filter(Boolean).join(", ");
}
