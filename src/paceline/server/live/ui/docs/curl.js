// A request as a command for a shell. The key is never written out: it is taken from the environment.

import { keyring } from "../feed.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// `body`: a value, or the text of one as it was typed; `form`: a file is sent instead.
export function curl({ method, path, body, form = false, stream = false }) {
  const parts = [`curl ${stream ? "-N " : ""}${method === "get" ? "" : `-X ${method.toUpperCase()} `}${quoted(location.origin + path)}`];
  if (keyring.get()) parts.push(`-H "Authorization: Bearer $PACELINE_API_KEY"`);
  if (form) parts.push("-F purpose=batch", "-F file=@requests.jsonl");
  if (body !== undefined) {
    parts.push("-H 'Content-Type: application/json'", `-d ${quoted(typeof body === "string" ? body : JSON.stringify(body))}`);
  }
  return parts.join(" \\\n  ");
}
