// The inside of a paragraph as DOM nodes: code, strong, emphasis, strikethrough, links and line breaks.

import { element } from "../dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MOST_LETTERS = 20_000; // of a paragraph; a longer one is shown as it is
const MOST_OPEN = 40; // marks inside each other; further ones are text
const MOST_LABEL = 1000, MOST_URL = 2000; // characters that are searched for the end of a link
const PLAIN = /(?:[^\\`*_~[\]!<\nh]|h(?!ttps?:\/\/))+/y; // what means nothing here
const URL_HERE = /https?:\/\/[^\s<>"`]{1,2000}/y;
const ESCAPABLE = /[!-/:-@[-`{-~]/;

export function inline(text, hasLinks = true) {
  if (text.length > MOST_LETTERS) return [text];
  const frames = [{ nodes: [] }], missing = new Set(); // missing: lengths of backticks that never come again
  const add = (...nodes) => frames.at(-1).nodes.push(...nodes);
  for (let at = 0; at < text.length; ) {
    const found = special(text, at, hasLinks, missing);
    if (found) {
      add(...found.nodes);
      at = found.end;
    } else if ("*_~".includes(text[at])) at = mark(text, at, frames);
    else {
      PLAIN.lastIndex = at;
      const plain = PLAIN.exec(text)?.[0] ?? text[at];
      add(plain);
      at += plain.length;
    }
  }
  while (frames.length > 1) flatten(frames, frames.length - 2);
  return frames[0].nodes;
}

function special(text, at, hasLinks, missing) {
  switch (text[at]) {
    case "\\":
      return ESCAPABLE.test(text[at + 1] ?? "") ? { nodes: [text[at + 1]], end: at + 2 } : null;
    case "\n":
      return { nodes: [element("br")], end: at + 1 };
    case "`":
      return codeSpan(text, at, missing);
    case "!":
      return hasLinks && text[at + 1] === "[" ? bracketed(text, at + 1) : null; // a picture is a link: nothing is loaded
    case "[":
      return hasLinks ? bracketed(text, at) : null;
    case "<":
      return hasLinks ? angled(text, at) : null;
    case "h":
      return hasLinks ? bare(text, at) : null;
  }
  return null;
}

// ------------------------------------------------------------ code

function codeSpan(text, at, missing) {
  const length = runLength(text, at);
  for (let end = at + length; !missing.has(length); ) {
    end = text.indexOf("`", end);
    if (end < 0) missing.add(length);
    else if (runLength(text, end) === length) {
      const inside = text.slice(at + length, end).replaceAll("\n", " ");
      const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
      return { nodes: [element("code", { text: padded ? inside.slice(1, -1) : inside })], end: end + length };
    } else end += runLength(text, end);
  }
  return { nodes: [text.slice(at, at + length)], end: at + length };
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

// ------------------------------------------------------------ links

function link(target, nodes) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null;
  }
  if (!SCHEMES.has(url.protocol)) return null;
  return element("a", { href: url.href, title: url.href, rel: "noopener noreferrer", target: "_blank" }, ...nodes);
}

function bracketed(text, at) {
  const close = matching(text, at, "[", "]", MOST_LABEL);
  if (close < 0 || text[close + 1] !== "(") return null;
  const end = matching(text, close + 1, "(", ")", MOST_URL);
  if (end < 0) return null;
  const target = text.slice(close + 2, end).trim().split(/\s/)[0].replace(/^<(.*)>$/, "$1");
  const made = link(target, inline(text.slice(at + 1, close), false));
  return made && { nodes: [made], end: end + 1 };
}

function matching(text, at, open, close, most) {
  let depth = 0;
  for (let end = at, last = Math.min(text.length, at + most); end < last; end++) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === open) depth += 1;
    else if (text[end] === close && --depth === 0) return end;
  }
  return -1;
}

function angled(text, at) {
  const end = text.slice(at, at + MOST_URL).search(/[>\s]/) + at;
  if (end < at || text[end] !== ">") return null;
  const target = text.slice(at + 1, end), made = link(target, [target]);
  return made && { nodes: [made], end: end + 1 };
}

function bare(text, at) {
  URL_HERE.lastIndex = at;
  let found = URL_HERE.exec(text)?.[0];
  if (!found || /\w/.test(text[at - 1] ?? "")) return null;
  for (;;) {
    const last = found.at(-1), isExtra = last === ")" && count(found, "(") < count(found, ")");
    if (!isExtra && !".,;:!?'*_~]".includes(last)) break;
    found = found.slice(0, -1);
  }
  const made = link(found, [found]);
  return made && { nodes: [made], end: at + found.length };
}

const count = (text, letter) => text.split(letter).length - 1;

// ------------------------------------------------------------ strong, emphasis, strikethrough

// A run of marks closes what is open and opens the rest. A frame is what stands inside an open run.
function mark(text, at, frames) {
  const sign = text[at], length = runLength(text, at), end = at + length;
  const before = text[at - 1] ?? " ", after = text[end] ?? " ";
  const isWord = (letter) => /[\p{L}\p{N}]/u.test(letter), isSpace = (letter) => /\s/.test(letter);
  let opens = !isSpace(after) && (isWord(after) || !isWord(before));
  let closes = !isSpace(before) && (isWord(before) || !isWord(after));
  if (sign === "_") [opens, closes] = [opens && !isWord(before), closes && !isWord(after)];
  let left = length;
  while (closes && left > 0) {
    const place = frames.findLastIndex((frame) => frame.sign === sign);
    if (place < 0 || (sign === "~" && left < 2)) break;
    while (frames.length - 1 > place) flatten(frames, place);
    left -= close(frames, left);
  }
  if (left && opens && frames.length < MOST_OPEN && !(sign === "~" && left < 2)) frames.push({ sign, left, nodes: [] });
  else if (left) frames.at(-1).nodes.push(sign.repeat(left));
  return end;
}

// Wraps the innermost frame in one element; how many marks that took.
function close(frames, most) {
  const frame = frames.at(-1), taken = Math.min(2, frame.left, most);
  const tag = frame.sign === "~" ? "s" : taken === 2 ? "strong" : "em";
  frame.nodes = [element(tag, {}, ...frame.nodes)];
  frame.left -= taken;
  if (!frame.left) {
    frames.pop();
    frames.at(-1).nodes.push(...frame.nodes);
  }
  return taken;
}

// What is open inside a place was never closed: its marks are text.
function flatten(frames, place) {
  const [loose] = frames.splice(place + 1, 1);
  frames[place].nodes.push(loose.sign.repeat(loose.left), ...loose.nodes);
}
