// Messages of the server, one after another: server-sent events read with fetch, so that a key can go with them.

const KEY = "paceline-admin-key";

export const keyring = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (key) => sessionStorage.setItem(KEY, key),
};

export function headers() {
  const key = keyring.get();
  return key ? { authorization: `Bearer ${key}` } : {};
}

export async function ask(path) {
  const answer = await fetch(path, { headers: headers() });
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error?.message || answer.statusText), { status: answer.status });
  return body;
}

// Calls `onMessage` with each message and `onState` with "live", "key" or "lost"; goes on until it is told to stop.
export async function follow(path, onMessage, onState) {
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    try {
      const answer = await fetch(path, { headers: headers() });
      if (answer.status === 401 || answer.status === 403) {
        const body = await answer.json();
        return onState("key", body.error?.message || "");
      }
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      onState("live", "");
      pause = 500;
      for await (const data of events(answer.body)) onMessage(data);
    } catch (error) {
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
