// One answer on its way: asks for it, writes what comes into its message, and says how it ended. Knows no page.

import { events, headers } from "../feed.js";
import { requestBody } from "./conversation.js";

const MOST_TRIES = 6;
const CONNECTION = "connection_lost", ENDED_EARLY = "ended_early";

export class Answer {
  // `onChange` is called at every change of the message, `onRequest` the id of the request, once it has one.
  constructor(conversation, { onChange, onRequest }) {
    Object.assign(this, { conversation, onChange, onRequest, message: conversation.messages.at(-1) });
    this.control = new AbortController();
    this.wake = null; // ends a pause before another try
    this.tokensBefore = this.message.tokens ?? 0; // when an answer is continued
    this.hasBegun = false; // whether anything of it has come
    this.decoder = new TextDecoder(); // a token can end within a letter
  }

  async run() {
    const { message } = this;
    for (let tries = 1; ; tries++) {
      Object.assign(message, { state: message.content ? "writing" : "waiting", problem: null, finish: null });
      this.onChange(message);
      try {
        await this.write();
        Object.assign(message, { state: "done" });
      } catch (error) {
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
    const { message, control } = this, sent = performance.now();
    const body = requestBody(this.conversation);
    if (body.response_format) message.form = "json";
    const request = { method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body), signal: control.signal };
    const answer = await fetch("/v1/chat/completions", request);
    if (!answer.ok) throw await refusalOf(answer);
    let pieces = 0, first = null, last = null, tokens = null;
    for await (const chunk of events(answer.body)) {
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), { code: chunk.error.code });
      if (chunk.id && message.request !== chunk.id) {
        message.request = chunk.id;
        this.onRequest(chunk.id);
      }
      tokens = chunk.usage?.completion_tokens ?? tokens;
      const choice = chunk.choices?.[0];
      if (choice && this.take(choice)) {
        message.state = "writing";
        this.hasBegun = true;
        last = performance.now();
        first ??= last;
        pieces += 1;
      }
      if (choice?.finish_reason) message.finish = choice.finish_reason;
      this.measure(tokens ?? pieces, sent, first, last);
      this.onChange(message);
    }
    if (!message.finish) throw Object.assign(new Error("The server ended the answer early."), { code: ENDED_EARLY });
  }

  // What a chunk has of reasoning, text, calls and probabilities; false where it has nothing to show.
  take({ delta = {}, logprobs }) {
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
    return Boolean(reasoning || content || calls?.length);
  }

  takeCall({ index, id, function: called }) {
    const call = ((this.message.calls ??= [])[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }

  tokenOf({ token, bytes, logprob, top_logprobs: top = [] }) {
    const rounded = (value) => Math.round(1000 * value) / 1000; // for the sake of the storage
    const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
    return [text, rounded(logprob), top.map((other) => [other.token, rounded(other.logprob)])];
  }

  measure(tokens, sent, first, last) {
    const { message, tokensBefore } = this;
    if (first === null) return;
    message.tokens = tokensBefore + tokens;
    message.ttft = Math.round(first - sent);
    // The name of a call is known some tokens after it began: what came since says nothing of the speed.
    if (tokens > 1 && last > first && !message.calls) message.rate = ((tokens - 1) * 1000) / (last - first);
  }

  // Whether the request can be sent once more: nothing has come of it, and the server said when to.
  async mayTryAgain(problem, tries) {
    const { message } = this;
    if (!problem || this.hasBegun || tries >= MOST_TRIES) return false;
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
