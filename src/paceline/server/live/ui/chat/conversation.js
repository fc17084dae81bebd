// A conversation is plain data, as it is stored:
//   { id, title, created, updated, settings, messages: [message] }
// Settings are { system, sampling, schema, tools, tool_choice, logprobs }: schema and tools are the texts that were pasted.
// A message is { role, content }, and an answer also tells how it went:
//   { state, finish, problem, request, tokens, rate, ttft }
// `state` is "waiting" (nothing has come), "writing", "done", "stopped" or "failed". Where it has them, also
//   reasoning, thought_ms   what the model thought before it answered, and how long it took
//   calls                   [{ id, name, arguments, result }]: arguments are JSON as text, a result is what was sent back
//   logprobs                [[text, logprob, [[text, logprob]], true]]: each token with the likeliest at its place,
//                           and true where it came as a draft
//   form, view              "json" where a schema was sent; how a reader chose to see it
//   branch, held            its number among the branches of the request; whether the server keeps it at its end
//   branches, place         the other branches of a forked answer, and where among them it stands itself: the message is
//                           the one that the conversation goes on with

const MOST_TITLE = 60;
const UNDER_WAY = new Set(["waiting", "writing"]);
const NUM_ALTERNATIVES = 5;

export const newSettings = () => ({ system: "", sampling: {}, schema: "", tools: "", tool_choice: "", logprobs: false });

export function newConversation(settings = newSettings()) {
  const now = Date.now(), id = now.toString(36) + Math.random().toString(36).slice(2, 10);
  return { id, title: "", created: now, updated: now, settings: structuredClone(settings), messages: [] };
}

export const newAnswer = () => ({ role: "assistant", content: "", state: "waiting" });

export const isUnderWay = (message) => UNDER_WAY.has(message?.state);

// Whether the server can still fork it or put text into it.
export const isLive = (message) => Boolean(message.held || (isUnderWay(message) && message.request));

// All branches of an answer, from left to right.
export function columnsOf(message) {
  const { branches = [], place = 0 } = message;
  return [...branches.slice(0, place), message, ...branches.slice(place)];
}

// Branches as one message: the conversation goes on with `chosen`.
export function arranged(columns, chosen) {
  for (const each of columns) for (const name of ["branches", "place"]) delete each[name];
  if (columns.length > 1) Object.assign(chosen, { branches: columns.filter((each) => each !== chosen), place: columns.indexOf(chosen) });
  return chosen;
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user")?.content.trim().split("\n")[0] ?? "";
  return first.length > MOST_TITLE ? `${first.slice(0, MOST_TITLE)}…` : first || "New chat";
}

// What was read from the storage, as it must be; null where it is no conversation.
export function restored(found) {
  if (typeof found?.id !== "string" || !Array.isArray(found.messages)) return null;
  if (!found.messages.every(isMessage)) return null;
  const settings = newSettings();
  for (const [name, value] of Object.entries(settings)) if (typeof found.settings?.[name] === typeof value) settings[name] = found.settings[name] ?? value;
  return { title: "", created: 0, updated: 0, ...found, settings, messages: found.messages.map(restoredMessage) };
}

const isMessage = (message) => ["user", "assistant"].includes(message?.role) && typeof message.content === "string";

// Without the parts that are not as they must be.
function restoredMessage(message) {
  const isText = (value) => typeof value === "string";
  const isCall = (call) => isText(call?.id) && isText(call.name) && isText(call.arguments) && (call.result === undefined || isText(call.result));
  const isToken = (token) => Array.isArray(token) && isText(token[0]) && Array.isArray(token[2]);
  const { reasoning, calls, logprobs, branches, place, ...rest } = message;
  if (isText(reasoning)) rest.reasoning = reasoning;
  if (Array.isArray(calls) && calls.every(isCall)) rest.calls = calls;
  if (Array.isArray(logprobs) && logprobs.every(isToken)) rest.logprobs = logprobs;
  if (Array.isArray(branches) && branches.every(isMessage)) Object.assign(rest, { branches: branches.map((each) => restoredMessage({ ...each, branches: null })), place: Number(place) || 0 });
  return rest;
}

// An answer whose page was closed has stopped.
export function interrupted(conversation) {
  for (const message of conversation.messages.flatMap(columnsOf)) cut(message);
  return conversation;
}

// What it has is all that comes.
export function cut(message, problem = null) {
  if (isUnderWay(message)) Object.assign(message, { state: problem ? "failed" : "stopped", problem });
  delete message.held;
}

// Whether an answer can go on from where it is: text can. JSON and calls cannot, a form begins at its beginning.
export const canGoOn = (message) => Boolean(message.content) && !message.calls?.length && message.form !== "json";

// The body of a request for an answer to be written: the last message, or a branch of it. Templates expect turns to alternate:
// answers without a word are left out and messages that then follow each other are joined. Throws where a setting
// cannot be sent.
export function requestBody({ settings, messages }, answer) {
  const turns = turnsOf([...messages.slice(0, -1), answer]);
  const isAsked = turns.at(-1)?.role === "user";
  if (settings.system.trim()) turns.unshift({ role: "system", content: settings.system });
  const body = { messages: turns, stream: true, stream_options: { include_usage: true }, ...settings.sampling };
  if (settings.schema.trim()) body.response_format = responseFormat(settings.schema);
  if (settings.tools.trim()) body.tools = toolList(settings.tools);
  // With a result at hand the model must be able to answer: a call is required of the answer to a user alone.
  if (body.tools && settings.tool_choice && (settings.tool_choice !== "required" || isAsked)) body.tool_choice = settings.tool_choice;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES, return_drafted: true });
  return answer.content ? { ...body, continue_final_message: true } : body;
}

// A call goes with its result, or not at all. Reasoning is sent back while the model is still at the same question:
// templates leave out that of earlier ones.
function turnsOf(messages) {
  const turns = [], asked = messages.findLastIndex((message) => message.role === "user");
  for (const [at, { role, content, reasoning, calls = [] }] of messages.entries()) {
    const answered = calls.filter((call) => call.result !== undefined);
    if (!content && !answered.length) continue;
    if (turns.at(-1)?.role === role && !answered.length) {
      turns.at(-1).content += `\n\n${content}`;
      continue;
    }
    const turn = { role, content: content || null };
    if (reasoning && at > asked) turn.reasoning_content = reasoning;
    if (answered.length) turn.tool_calls = answered.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    turns.push(turn, ...answered.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result })));
  }
  return turns;
}

// ------------------------------------------------------------ what was pasted into the settings

// A schema, or OpenAI's object around one.
function responseFormat(text) {
  const given = parsed(text, "response_format", "The JSON schema");
  if (given?.type === "json_schema") return given;
  return { type: "json_schema", json_schema: given?.schema ? given : { name: "answer", schema: given } };
}

function toolList(text) {
  return [parsed(text, "tools", "The list of tools")].flat();
}

function parsed(text, param, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(`${name} in the settings is not JSON: ${error.message}.`), { code: "invalid_settings", param });
  }
}

// What is wrong with the settings before a server has seen them: a sentence by the field of the request.
export function settingProblems({ schema, tools }) {
  const found = {};
  for (const [text, read] of [[schema, responseFormat], [tools, toolList]]) {
    try {
      if (text.trim()) read(text);
    } catch (error) {
      found[error.param] = error.message;
    }
  }
  return found;
}
