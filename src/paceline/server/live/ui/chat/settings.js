// The drawer with the system prompt and sampling of a conversation. A field that is empty is not sent.

import { byId, element } from "../dom.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any", help: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: "any", help: "likeliest tokens of this mass only" },
  { name: "top_k", label: "Top k", min: -1, step: 1, help: "this many likeliest tokens only; 0: all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", help: "least probability, as a share of the likeliest" },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1, none: "what fits", help: "of an answer" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.001, max: 100, step: "any", help: "above 1: repeats are less likely" },
  { name: "seed", label: "Seed", step: 1, none: "random", help: "the same seed gives the same answer" },
  { name: "stop", label: "Stop texts", isText: true, none: "none", help: "end the answer; separated by commas" },
];

export class Settings {
  constructor(dialog, onChange) {
    this.dialog = dialog;
    this.onChange = onChange;
    this.settings = null;
    this.inputs = new Map(FIELDS.map((field) => [field.name, this.field(field)]));
    byId("system").addEventListener("input", () => this.changed());
    byId("reset").addEventListener("click", () => {
      Object.assign(this.settings, { system: "", sampling: {} });
      this.fill();
      this.onChange();
    });
  }

  field({ name, label, isText, min, max, step, help }) {
    const id = `sampling-${name}`, note = element("span", { class: "quiet", id: `${id}-help`, text: help });
    const attributes = isText ? { type: "text" } : { type: "number", inputmode: "decimal", min, max, step };
    const input = element("input", { id, ...attributes, "aria-describedby": note.id, input: () => this.changed() });
    byId("sampling").append(element("div", {}, element("label", { for: id, text: label }), input, note));
    return input;
  }

  // `defaults` are what the server does without them, where it says.
  open(settings, defaults) {
    this.settings = settings;
    for (const { name, none } of FIELDS) this.inputs.get(name).placeholder = String(defaults?.[name] ?? none ?? "default");
    this.fill();
    this.dialog.showModal();
  }

  fill() {
    byId("system").value = this.settings.system;
    for (const [name, input] of this.inputs) input.value = [this.settings.sampling[name] ?? ""].flat().join(", ");
  }

  changed() {
    const sampling = {};
    for (const { name, isText } of FIELDS) {
      const input = this.inputs.get(name), text = input.value.trim();
      input.setAttribute("aria-invalid", String(!input.checkValidity()));
      if (!text || !input.checkValidity()) continue;
      sampling[name] = isText ? text.split(",").map((each) => each.trim()).filter(Boolean) : Number(text);
    }
    Object.assign(this.settings, { system: byId("system").value, sampling });
    this.onChange();
  }
}

export const numSet = (settings) => Object.keys(settings.sampling).length + (settings.system.trim() ? 1 : 0);
