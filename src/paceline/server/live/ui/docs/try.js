// A form that sends one request from the page and shows what comes back: status, headers, body, and a stream as it comes.

import { headers as keyHeaders } from "../feed.js";
import { curl } from "./curl.js";
import { copyButton, element } from "../dom.js";

const SHOWN_HEADERS = /^(content-type|x-request-id|retry-after|server-timing|allow|www-authenticate|x-ratelimit-.*|anthropic-ratelimit-.*|x-paceline-.*)$/;
const MOST_CHARS = 200_000; // of a body that is shown: a feed has no end

export class TryIt {
  constructor(operation, onClose) {
    Object.assign(this, { operation, onClose, abort: null });
    this.parameters = new Map();
    this.command = element("pre");
    this.problem = element("p", { className: "problem quiet", role: "alert" });
    this.send = element("button", { text: "Send" });
    this.stop = element("button", { type: "button", className: "plain", text: "Stop", disabled: true });
    this.answer = element("div", { className: "answer", hidden: true });
    this.place = element("form", { className: "try" }, ...this.inputs(), this.problem, this.buttons(), this.answer, this.asCommand());
    this.place.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.place.addEventListener("input", () => this.update());
    this.place.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.place.requestSubmit();
    });
    this.update();
  }

  inputs() {
    const { operation } = this, found = [];
    for (const parameter of operation.described.parameters ?? []) {
      const input = element("input", { required: true, spellcheck: false });
      this.parameters.set(parameter.name, input);
      found.push(element("label", {}, `{${parameter.name}} in the path`, input));
    }
    if (operation.method === "get") {
      this.query = element("input", { placeholder: "limit=10", spellcheck: false });
      found.push(element("label", {}, "Query, where the route takes one", this.query));
    }
    if (operation.form) {
      this.file = element("input", { type: "file", required: true });
      found.push(element("label", {}, "File of requests (JSONL), sent with purpose=batch", this.file));
    }
    if (operation.json) found.push(...this.bodyInputs());
    return found;
  }

  bodyInputs() {
    const text = JSON.stringify(this.operation.example ?? {}, null, 2);
    this.body = element("textarea", { rows: Math.min(18, text.split("\n").length + 1), value: text, spellcheck: false });
    const found = [element("label", {}, "Body (JSON)", this.body)];
    if (this.operation.streams) {
      this.stream = element("input", { type: "checkbox", checked: true });
      this.stream.addEventListener("input", () => this.setStream()); // before the form hears of it
      found.push(element("label", { className: "check" }, this.stream, "stream the answer"));
      this.setStream();
    }
    return found;
  }

  // The checkbox and the field of the body say the same.
  setStream() {
    const body = this.parsed();
    if (body === null) return;
    if (this.stream.checked) body.stream = true;
    else delete body.stream;
    this.body.value = JSON.stringify(body, null, 2);
  }

  buttons() {
    const close = element("button", { type: "button", className: "plain", text: "Close" });
    close.addEventListener("click", () => {
      this.abort?.abort();
      this.onClose();
    });
    this.stop.addEventListener("click", () => this.abort?.abort());
    return element("div", { className: "bar" }, this.send, this.stop, close);
  }

  asCommand() {
    const bar = element("div", { className: "bar" }, element("span", { className: "quiet", text: "The same as a command" }), copyButton(() => this.command.textContent, { class: "plain" }));
    return element("div", {}, bar, this.command);
  }

  focus() {
    (this.parameters.values().next().value ?? this.body ?? this.send).focus();
  }

  parsed() {
    try {
      const value = JSON.parse(this.body.value);
      return value && typeof value === "object" && !Array.isArray(value) ? value : null;
    } catch {
      return null;
    }
  }

  path() {
    let path = this.operation.path;
    // A parameter that may hold slashes keeps them.
    for (const [name, input] of this.parameters) path = path.replace(`{${name}}`, encodeURIComponent(input.value).replaceAll("%2F", "/"));
    const query = this.query?.value.trim().replace(/^\?/, "");
    return query ? `${path}?${query}` : path;
  }

  update() {
    const body = this.body && this.parsed();
    this.problem.textContent = this.body && body === null ? "The body is not a JSON object; it is sent as it is." : "";
    if (this.stream && body) this.stream.checked = body.stream === true;
    const { method, form } = this.operation;
    const sent = this.body && (body ?? this.body.value);
    this.command.textContent = curl({ method, path: this.path(), body: sent || undefined, form: form !== undefined, stream: body?.stream === true });
  }

  async run() {
    const began = performance.now(), { method } = this.operation;
    this.abort = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    const shown = new Shown(this.answer, began);
    try {
      const options = { method: method.toUpperCase(), headers: keyHeaders(), signal: this.abort.signal };
      if (this.body) Object.assign(options, { body: this.body.value, headers: { ...options.headers, "content-type": "application/json" } });
      if (this.file) {
        options.body = new FormData();
        options.body.append("purpose", "batch");
        options.body.append("file", this.file.files[0]);
      }
      await shown.read(await fetch(this.path(), options));
    } catch (error) {
      shown.fail(error.name === "AbortError" ? "stopped" : `The request failed: ${error.message}`);
    }
    this.send.disabled = false;
    this.stop.disabled = true;
  }
}

// What came back, as far as it has come.
class Shown {
  constructor(place, began) {
    this.began = began;
    this.status = element("div", { className: "status" }, element("span", { className: "quiet", text: "waiting …" }));
    this.headers = element("dl", { className: "headers" });
    this.text = element("pre", { className: "text", hidden: true });
    this.raw = element("pre");
    place.replaceChildren(this.status, this.headers, this.text, this.raw);
    place.hidden = false;
  }

  async read(answer) {
    const good = element("b", { text: `${answer.status} ${answer.statusText}`.trim() });
    good.dataset.good = String(answer.ok);
    this.note = element("span", { className: "quiet", text: `first byte after ${this.elapsed()}` });
    this.status.replaceChildren(good, this.note);
    for (const [name, value] of answer.headers) {
      if (SHOWN_HEADERS.test(name)) this.headers.append(element("dt", { text: name }), element("dd", { text: value }));
    }
    const isStream = (answer.headers.get("content-type") ?? "").startsWith("text/event-stream");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let found = "", kept = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      found = (found + value).slice(-MOST_CHARS);
      this.raw.textContent = found;
      this.raw.scrollTop = this.raw.scrollHeight;
      if (isStream) {
        kept += value;
        for (let end; (end = kept.indexOf("\n\n")) >= 0; kept = kept.slice(end + 2)) this.piece(kept.slice(0, end));
      }
    }
    this.note.textContent += `, complete after ${this.elapsed()}`;
    if (!isStream) this.raw.textContent = pretty(found) || "(no body)";
  }

  // The text of one event, whichever of the four forms it has.
  piece(frame) {
    const line = frame.split("\n").find((each) => each.startsWith("data: "));
    if (!line || line === "data: [DONE]") return;
    try {
      const event = JSON.parse(line.slice(6)), choice = event.choices?.[0];
      const text = choice?.delta?.content ?? choice?.text ?? event.delta?.text ?? (typeof event.delta === "string" ? event.delta : "");
      if (text) {
        this.text.hidden = false;
        this.text.textContent += text;
      }
    } catch {
      // An event that is no JSON is shown as it came.
    }
  }

  fail(message) {
    if (this.note) this.note.textContent += `, ${message} after ${this.elapsed()}`;
    else this.status.replaceChildren(element("b", { text: message }));
  }

  elapsed() {
    const ms = performance.now() - this.began;
    return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
