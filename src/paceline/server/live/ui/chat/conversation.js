// A conversation is plain data, as it is stored:
//   { id, title, created, updated, settings: { system, sampling }, messages: [message] }
// A message is { role, content }, and an answer also tells how it went:
//   { state, finish, problem, request, tokens, rate, ttft }
// `state` is "waiting" (nothing has come), "writing", "done", "stopped" or "failed".

const MOST_TITLE = 60;
const UNDER_WAY = new Set(["waiting", "writing"]);

export function newConversation(settings = { system: "", sampling: {} }) {
  const now = Date.now(), id = now.toString(36) + Math.random().toString(36).slice(2, 10);
  return { id, title: "", created: now, updated: now, settings: structuredClone(settings), messages: [] };
}

export const newAnswer = () => ({ role: "assistant", content: "", state: "waiting" });

export const isUnderWay = (message) => UNDER_WAY.has(message?.state);

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user")?.content.trim().split("\n")[0] ?? "";
  return first.length > MOST_TITLE ? `${first.slice(0, MOST_TITLE)}…` : first || "New chat";
}

// What was read from the storage, as it must be; null where it is no conversation.
export function restored(found) {
  if (typeof found?.id !== "string" || !Array.isArray(found.messages)) return null;
  const isMessage = (message) => ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
  if (!found.messages.every(isMessage)) return null;
  const { system, sampling } = found.settings ?? {};
  return { title: "", created: 0, updated: 0, ...found, settings: { system: String(system ?? ""), sampling: sampling ?? {} } };
}

// An answer whose page was closed has stopped.
export function interrupted(conversation) {
  for (const message of conversation.messages) if (isUnderWay(message)) Object.assign(message, { state: "stopped", problem: null });
  return conversation;
}

// The body of a request for the last message, which is the answer to be written. Templates expect turns to alternate:
// answers without a word are left out and messages that then follow each other are joined.
export function requestBody(conversation) {
  const { settings, messages } = conversation, answer = messages.at(-1), turns = [];
  for (const { role, content } of messages) {
    if (!content) continue;
    if (turns.at(-1)?.role === role) turns.at(-1).content += `\n\n${content}`;
    else turns.push({ role, content });
  }
  if (settings.system.trim()) turns.unshift({ role: "system", content: settings.system });
  const body = { messages: turns, stream: true, stream_options: { include_usage: true }, ...settings.sampling };
  return answer.content ? { ...body, continue_final_message: true } : body;
}
