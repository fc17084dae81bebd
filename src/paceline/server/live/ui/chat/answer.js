// An answer or the branches of one on their way: asks for them, writes what comes into their messages, and says how they
// ended. Knows no page.

import { ask, events, headers } from "../feed.js";
import { cut, isUnderWay, requestBody } from "./conversation.js";

const MOST_TRIES = 6;
const CONNECTION = "connection_lost", ENDED_EARLY = "ended_early";

export class Answer {
  // `onChange` is called at every change of the message, `onRequest` the id of the request, once it has one.
  constructor(conversation, message, { onChange, onRequest }) {
    Object.assign(this, { conversation, message, onChange, onRequest });
    this.control = new AbortController();
    this.wake = null; // ends a pause before another try
    this.writer = new Writer(message);
  }

  async run() {
    const { message } = this;
    for (let tries = 1; ; tries++) {
      Object.assign(message, { state: message.content ? "writing" : "waiting", problem: null, finish: null });
      this.onChange(message);
      try {
        await this.write();
      } catch (error) {
        if (!isUnderWay(message)) return this.onChange(message); // all of it had come
        const problem = this.control.signal.aborted ? null : problemOf(error);
        if (await this.mayTryAgain(problem, tries)) continue;
        Object.assign(message, { state: problem ? "failed" : "stopped", problem });
      }
      return this.onChange(message);
    }
  }

  stop() {
    this.control.abort();
    this.wake?.();
  }

  tryNow() {
    this.wake?.();
  }

  async write() {
    const { message, control, writer } = this, body = requestBody(this.conversation, message);
    if (body.response_format) message.form = "json";
    writer.start();
    let tokens = null;
    for await (const chunk of chunks("/v1/chat/completions", body, control.signal)) {
      if (chunk.id && message.request !== chunk.id) {
        message.request = chunk.id;
        delete message.branch; // one that is continued is a request like any other
        this.onRequest(chunk.id);
      }
      tokens = chunk.usage?.completion_tokens ?? tokens;
      if (chunk.choices?.[0]) writer.take(chunk.choices[0]);
      writer.measure(tokens);
      this.onChange(message);
    }
    if (!message.finish) throw Object.assign(new Error("The server ended the answer early."), { code: ENDED_EARLY });
  }

  // Whether the request can be sent once more: nothing has come of it, and the server said when to.
  async mayTryAgain(problem, tries) {
    const { message } = this;
    if (!problem || this.writer.pieces || tries >= MOST_TRIES) return false;
    if (!problem.retryS) return false;
    message.problem = { ...problem, retryAt: Date.now() + 1000 * problem.retryS };
    this.onChange(message);
    await new Promise((wake) => {
      this.wake = wake;
      setTimeout(wake, 1000 * problem.retryS);
    });
    this.wake = null;
    return !this.control.signal.aborted;
  }
}

// New branches of an answer that is live, all in one stream. The server keeps those that reach their length, so that they
// can go on.
export class Fork {
  // `onBranches` gets the branches, once they are made.
  constructor(parent, body, { onChange, onRequest, onBranches }) {
    Object.assign(this, { parent, body, onChange, onRequest, onBranches, control: new AbortController(), writers: new Map() });
  }

  // Returns the problem where the server refused.
  async run() {
    let problem = null;
    try {
      for await (const chunk of chunks(pathOf(this.parent, "fork"), { stream: true, on_stop: "hold", ...this.body }, this.control.signal)) {
        if (chunk.fork) this.begin(chunk);
        for (const choice of chunk.choices) this.take(choice);
      }
    } catch (error) {
      problem = this.control.signal.aborted ? null : problemOf(error);
    }
    const cause = problem ?? (this.control.signal.aborted ? null : { code: ENDED_EARLY, message: "The server ended the answer early." });
    for (const { message } of this.writers.values()) {
      cut(message, cause);
      this.onChange(message);
    }
    return this.writers.size ? null : problem;
  }

  stop() {
    this.control.abort();
  }

  begin({ id, fork }) {
    const { reasoning, thought_ms, form, logprobs } = this.parent;
    const known = { reasoning, thought_ms, form, logprobs: logprobs && [unknown(fork.text)] };
    for (const name of fork.branches) {
      const branch = Number(name.split("/").at(-1)), message = { role: "assistant", content: fork.text, state: "writing", request: id, branch };
      for (const [name, value] of Object.entries(known)) if (value !== undefined) message[name] = value;
      this.writers.set(branch, new Writer(message));
    }
    this.onBranches([...this.writers.values()].map((writer) => writer.message));
    this.onRequest(id);
  }

  take(choice) {
    const writer = this.writers.get(choice.index);
    if (!writer) return;
    writer.take(choice);
    this.onChange(writer.message);
    // What ended with its last word is complete: text behind that would stand outside of the answer.
    if (choice.held === "stop") change(writer.message, "prune").catch(() => {});
  }
}

// Writes what comes of one choice into its message.
class Writer {
  constructor(message) {
    this.message = message;
    this.tokensBefore = message.tokens ?? (message.content ? null : 0); // when an answer is continued; null: unknown
    this.decoder = new TextDecoder(); // a token can end within a letter
    this.start();
  }

  start() {
    Object.assign(this, { sent: performance.now(), first: null, last: null, pieces: 0 });
  }

  take(choice) {
    const { message } = this;
    if (this.read(choice)) {
      message.state = "writing";
      delete message.held;
      this.last = performance.now();
      this.first ??= this.last;
      this.pieces += 1;
    }
    if (choice.held) Object.assign(message, { state: "done", finish: choice.held, held: true });
    if (!choice.finish_reason) return;
    const isPruned = choice.finish_reason === "abort" && message.finish !== "stop";
    if (isPruned || choice.finish_reason !== "abort") message.finish = choice.finish_reason;
    message.state = isPruned ? "stopped" : "done";
    delete message.held;
  }

  // Whether there was anything new in it.
  read({ delta = {}, logprobs, injected }) {
    const { message } = this, { content, reasoning_content: reasoning, tool_calls: calls } = delta;
    if (reasoning) {
      message.reasoning = (message.reasoning ?? "") + reasoning;
      this.thinkingSince ??= performance.now() - (message.thought_ms ?? 0);
    }
    if (this.thinkingSince !== undefined) message.thought_ms = Math.round(performance.now() - this.thinkingSince);
    if (content || calls?.length) this.thinkingSince = undefined;
    if (content) message.content += content;
    for (const call of calls ?? []) this.takeCall(call);
    // Only the answer's own tokens; one whose text is held back comes with an empty delta.
    if (logprobs?.content && !reasoning && !calls) (message.logprobs ??= []).push(...logprobs.content.map((token) => this.tokenOf(token)));
    if (injected && content && message.logprobs) message.logprobs.push(unknown(content));
    return Boolean(reasoning || content || calls?.length);
  }

  takeCall({ index, id, function: called }) {
    const call = ((this.message.calls ??= [])[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }

  tokenOf({ token, bytes, logprob, top_logprobs: top = [], drafted }) {
    const rounded = (value) => Math.round(1000 * value) / 1000; // for the sake of the storage
    const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
    const known = [text, rounded(logprob), top.map((other) => [other.token, rounded(other.logprob)])];
    return drafted ? [...known, true] : known;
  }

  // `tokens` is the server's count, where there is one.
  measure(tokens) {
    const { message, tokensBefore, sent, first, last } = this, count = tokens ?? this.pieces;
    if (first === null) return;
    if (tokensBefore !== null) message.tokens = tokensBefore + count;
    message.ttft = Math.round(first - sent);
    // The name of a call is known some tokens after it began: what came since says nothing of the speed.
    if (count > 1 && last > first && !message.calls) message.rate = ((count - 1) * 1000) / (last - first);
  }
}

// A text among the tokens of an answer of which no probability is known.
export const unknown = (text) => [text, null, []];

const pathOf = ({ request, branch = 0 }, what) => `/v1/requests/${encodeURIComponent(request)}/${branch}/${what}`;

// Changes a live answer: "extend" with text, or with more tokens, or "prune".
export function change(message, what, body = {}) {
  if (what === "extend") return ask(pathOf(message, what), body, "POST");
  return ask(`/v1/requests/${encodeURIComponent(message.request)}/prune`, { branches: [message.branch ?? 0] }, "POST");
}

async function* chunks(path, body, signal) {
  const answer = await fetch(path, { method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body), signal });
  if (!answer.ok) throw await refusalOf(answer);
  for await (const chunk of events(answer.body)) {
    if (chunk.error) throw Object.assign(new Error(chunk.error.message), { code: chunk.error.code });
    yield chunk;
  }
}

async function refusalOf(answer) {
  let refusal = {};
  try {
    refusal = (await answer.json()).error ?? {};
  } catch {} // a proxy's page
  const retryS = [429, 503].includes(answer.status) ? Number(answer.headers.get("retry-after")) || null : null;
  const message = refusal.message || `The server answered ${answer.status}.`;
  return Object.assign(new Error(message), { code: refusal.code ?? "", param: refusal.param ?? null, status: answer.status, retryS });
}

function problemOf(error) {
  const isTold = error.status !== undefined || typeof error.code === "string"; // a DOMException has a number
  if (!isTold) return { code: CONNECTION, message: "The connection to the server was lost.", status: 0 };
  const { code, param = null, status = 0, retryS = null } = error;
  return { code, param, message: sentence(error.message), status, retryS };
}

// Some of the server's messages are clauses.
function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
