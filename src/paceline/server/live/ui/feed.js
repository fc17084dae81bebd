// Messages of the server, one after another: server-sent events read with fetch, so that a key can go with them.

const KEY = "paceline-admin-key";

let kept = ""; // where the browser gives the page no storage

export const keyring = {
  get() {
    try {
      return sessionStorage.getItem(KEY) || "";
    } catch {
      return kept;
    }
  },
  set(key) {
    kept = key;
    try {
      if (key) sessionStorage.setItem(KEY, key);
      else sessionStorage.removeItem(KEY);
    } catch {} // kept for as long as the page is open
  },
};

export function headers() {
  const key = keyring.get();
  return key ? { authorization: `Bearer ${key}` } : {};
}

// The JSON a path answers with; what the server refuses is thrown with its own sentence. With a body it is a PUT, unless told.
export async function ask(path, body = undefined, method = "PUT") {
  const change = { method, headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body) };
  const answer = await fetch(path, body === undefined ? { headers: headers() } : change);
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error?.message || answer.statusText), { status: answer.status });
  return found;
}

// Whether the server refused a request for its key: it has none, a wrong one, or one that is no admin's.
export const isKeyProblem = (status) => status === 401 || status === 403;

// Calls `onMessage` with each message and `onState` with "live", "key" and the status, or "lost" and a note; goes on until
// the signal, if there is one.
export async function follow(path, onMessage, onState, signal = undefined) {
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    try {
      const answer = await fetch(path, { headers: headers(), signal });
      if (isKeyProblem(answer.status)) return onState("key", answer.status);
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      onState("live", "");
      pause = 500;
      for await (const data of events(answer.body)) onMessage(data);
      onState("lost", "the server has ended the feed");
    } catch (error) {
      if (signal?.aborted) return;
      onState("lost", error.message);
    }
    await new Promise((wake) => setTimeout(wake, pause));
  }
}

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    kept += value;
    for (let end; (end = kept.indexOf("\n\n")) >= 0; kept = kept.slice(end + 2)) {
      const frame = kept.slice(0, end);
      if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}
