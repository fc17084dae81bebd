// The drawer with the system prompt, the form of answers, the tools and the sampling of a conversation. A field that is
// empty is not sent.

import { newSettings, settingProblems } from "./conversation.js";
import { byId, element } from "../dom.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any", help: "0: always the most likely token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: "any", help: "only the most likely tokens with this total probability" },
  { name: "top_k", label: "Top k", min: -1, step: 1, help: "only this number of the most likely tokens; 0: all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", help: "minimum probability, relative to the most likely token; 0: off" },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1, none: "what fits", help: "of an answer" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.001, max: 100, step: "any", help: "above 1: repeats are less likely" },
  { name: "seed", label: "Seed", step: 1, none: "random", help: "the same seed gives the same answer" },
  { name: "stop", label: "Stop texts", isText: true, none: "none", help: "end the answer; separated by commas" },
];

const PLAIN = ["system", "schema", "tools", "tool_choice", "logprobs"]; // an element of the same name holds each
const NOTES = { schema: ["response_format"], tools: ["tools", "tool_choice"] }; // fields of a request, by where problems with them are said

export class Settings {
  constructor(dialog, onChange) {
    this.dialog = dialog;
    this.onChange = onChange;
    this.settings = null;
    this.inputs = new Map(FIELDS.map((field) => [field.name, this.field(field)]));
    for (const name of PLAIN) byId(name).addEventListener("input", () => this.changed());
    byId("reset").addEventListener("click", () => {
      Object.assign(this.settings, newSettings());
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

  // `defaults` are what the server does without them, where it says; `problem` is what it said of the last request.
  open(settings, defaults, problem) {
    this.settings = settings;
    this.refused = problem?.param ? { [problem.param]: problem.message } : {};
    for (const { name, none } of FIELDS) this.inputs.get(name).placeholder = String(defaults?.[name] ?? none ?? "default");
    this.fill();
    this.dialog.showModal();
  }

  fill() {
    for (const name of PLAIN) byId(name)[valueName(name)] = this.settings[name];
    for (const [name, input] of this.inputs) input.value = [this.settings.sampling[name] ?? ""].flat().join(", ");
    this.showProblems();
  }

  // Until a field is changed, the server's word about it; then what can be seen without it.
  showProblems() {
    const found = { ...this.refused, ...settingProblems(this.settings) };
    for (const [name, params] of Object.entries(NOTES)) {
      const problem = params.map((param) => found[param]).find(Boolean);
      byId(`${name}-note`).textContent = problem ?? "";
      byId(name).setAttribute("aria-invalid", String(Boolean(problem)));
    }
  }

  changed() {
    const sampling = {};
    for (const { name, isText } of FIELDS) {
      const input = this.inputs.get(name), text = input.value.trim();
      input.setAttribute("aria-invalid", String(!input.checkValidity()));
      if (!text || !input.checkValidity()) continue;
      sampling[name] = isText ? text.split(",").map((each) => each.trim()).filter(Boolean) : Number(text);
    }
    Object.assign(this.settings, { sampling });
    for (const name of PLAIN) this.settings[name] = byId(name)[valueName(name)];
    this.refused = {};
    this.showProblems();
    this.onChange();
  }
}

const valueName = (name) => (name === "logprobs" ? "checked" : "value");

export const numSet = (settings) => Object.keys(settings.sampling).length + ["system", "schema", "tools", "logprobs"].filter((name) => String(settings[name] || "").trim()).length;
