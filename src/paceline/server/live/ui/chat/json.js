// JSON as its writer spelled it, laid out in lines: no number is rounded and no key is moved or lost.

export function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// A JSON text with a line for each entry. Another text comes back as it is.
export function indented(text) {
  if (!isJson(text)) return text;
  let shown = "", depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  for (const [part] of text.matchAll(/"(?:[^"\\]|\\.)*"|[{[]\s*[}\]]|[^\s"{}[\],:]+|\S/g)) {
    if (/^[{[]./s.test(part)) shown += part[0] + part.at(-1); // an empty one
    else if (part === "{" || part === "[") {
      depth += 1;
      shown += part + line();
    } else if (part === "}" || part === "]") {
      depth -= 1;
      shown += line() + part;
    } else if (part === ",") shown += part + line();
    else shown += part === ":" ? ": " : part;
  }
  return shown;
}
