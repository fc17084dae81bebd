// Markdown as DOM nodes, while it is still being written.
//
// A text is a list of blocks. New text can only change the last one, so that only the last one is parsed again, and of
// its nodes only those are replaced whose source has changed. Nodes are made with textContent alone; a link goes to
// http, https or mailto, or it stays text. Every loop is bounded by the length of what it reads.

import { copyButton, element } from "../dom.js";
import { inline } from "./inline.js";

const MOST_LETTERS = 200_000; // a longer text is shown as it is
const MOST_DEPTH = 12; // of lists and quotes inside each other; what is deeper is text
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|$)/;
const DELIMITER = /^:?-+:?$/;

export class Markdown {
  constructor(place) {
    this.place = place;
    this.source = "";
    this.from = 0; // where the last block begins
    this.blocks = []; // those from there on, as they are shown
  }

  // The whole text. What it shares with the text before is not looked at again.
  show(source) {
    if (source === this.source) return;
    if (!source.startsWith(this.source)) {
      this.place.replaceChildren();
      Object.assign(this, { from: 0, blocks: [] });
    }
    this.source = source;
    if (source.length > MOST_LETTERS) return this.place.replaceChildren(element("pre", { text: source }));
    const lines = source.slice(this.from).split("\n"), blocks = parse(lines, 0);
    patch(this.place, this.blocks, blocks);
    for (let line = 0, last = blocks.at(-1)?.line ?? 0; line < last; line++) this.from += lines[line].length + 1;
    this.blocks = blocks.slice(-1).map((block) => ({ ...block, line: 0 }));
  }
}

// ------------------------------------------------------------ lines to blocks

// Each block has its kind, the line it begins with, its source, and its content: text, items, cells or inner blocks.
function parse(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const block = (depth < MOST_DEPTH && container(lines, at, depth)) || leaf(lines, at);
    blocks.push({ line: at, source: lines.slice(at, block.end).join("\n"), ...block });
    at = block.end;
  }
  return blocks;
}

function leaf(lines, at) {
  return fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? table(lines, at) ?? paragraph(lines, at);
}

function container(lines, at, depth) {
  if (isRule(lines[at])) return null;
  return quote(lines, at, depth) ?? list(lines, at, depth);
}

const isBlank = (line) => line.trim() === "";

function fence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found) return null;
  const [, mark, info] = found, indent = lines[at].indexOf(mark);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end += 1;
  const body = lines.slice(at + 1, end).map((line) => dedent(line, indent));
  return { kind: "code", language: info.trim().split(/\s/)[0], text: body.join("\n"), end: Math.min(end + 1, lines.length) };
}

function closes(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && text[0] === mark[0] && isRun(text) && line.search(/\S/) < 4;
}

const isRun = (text) => [...text].every((each) => each === text[0]);

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  let text = (found[2] ?? "").trimEnd(), bare = text.length;
  while (text[bare - 1] === "#") bare -= 1;
  if (bare === 0 || /\s/.test(text[bare - 1])) text = text.slice(0, bare).trimEnd();
  return { kind: "heading", level: found[1].length, text, end: at + 1 };
}

function isRule(line) {
  const text = line.replaceAll(/\s/g, "");
  return text.length > 2 && "-*_".includes(text[0]) && isRun(text);
}

function rule(lines, at) {
  return isRule(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { kind: "quote", blocks: parse(inner, depth + 1), end };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const isOrdered = /\d/.test(first[2]), items = [];
  let end = at;
  for (;;) {
    const found = end < lines.length ? ITEM.exec(lines[end]) : null;
    if (!found || /\d/.test(found[2]) !== isOrdered || isRule(lines[end])) break;
    const item = itemOf(lines, end, found, depth);
    items.push(item);
    end = item.end;
    while (end < lines.length && isBlank(lines[end])) end += 1; // between items; after the last it belongs to nothing
  }
  return { kind: "list", isOrdered, start: isOrdered ? parseInt(first[2]) : 1, blocks: items, end: items.at(-1).end };
}

// The lines of an item: those that stand further right than its mark, and a paragraph's lines that stand anywhere.
function itemOf(lines, at, [, lead, mark, gap = " ", rest = ""], depth) {
  const least = lead.length + 2, wanted = lead.length + mark.length + Math.min(gap.length, 4);
  const inner = [rest];
  let end = at + 1;
  for (let blanks = 0; end + blanks < lines.length; ) {
    const line = lines[end + blanks];
    if (isBlank(line)) {
      blanks += 1;
      continue;
    }
    const indent = indentOf(line), goesOn = !blanks && !begins(line);
    if (indent < least && !goesOn) break;
    inner.push(...Array(blanks).fill(""), dedent(line, wanted));
    end += blanks + 1;
    blanks = 0;
  }
  const source = lines.slice(at, end).join("\n");
  return { kind: "item", source, blocks: parse(inner, depth + 1), end };
}

// Whether a line is no continuation of a paragraph.
function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || isRule(line);
}

const TAB = 4; // columns

function indentOf(line) {
  let columns = 0;
  for (const letter of line) {
    if (letter === "\t") columns += TAB;
    else if (letter === " ") columns += 1;
    else break;
  }
  return columns;
}

function dedent(line, most) {
  let count = 0;
  for (let columns = 0; columns < most && (line[count] === " " || line[count] === "\t"); count++) columns += line[count] === " " ? 1 : TAB;
  return line.slice(count);
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return null;
  const head = cells(lines[at]), marks = cells(lines[at + 1]);
  if (!lines[at + 1].includes("-") || marks.length !== head.length) return null;
  if (!marks.every((mark) => DELIMITER.test(mark))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) end += 1;
  const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  return { kind: "table", head, sides, rows: lines.slice(at + 2, end).map(cells), end };
}

function cells(line) {
  const found = [], text = line.trim();
  let cell = "", isCode = false;
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at++) {
    if (text[at] === "\\" && text[at + 1] === "|") cell += text[++at];
    else if (text[at] === "|" && !isCode) {
      found.push(cell.trim());
      cell = "";
    } else {
      if (text[at] === "`") isCode = !isCode && text.indexOf("`", at + 1) >= 0;
      cell += text[at];
    }
  }
  if (cell.trim() || !text.endsWith("|")) found.push(cell.trim());
  return found;
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !begins(lines[end]) && !table(lines, end)) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).map((line) => line.trim()).join("\n"), end };
}

// ------------------------------------------------------------ blocks to nodes

// Makes the last children of a place, which show `old`, show `blocks`; what has not changed keeps its node.
function patch(place, old, blocks) {
  const before = place.childNodes.length - old.length;
  blocks.forEach((block, at) => {
    const was = old[at], node = place.childNodes[before + at];
    if (was?.kind === block.kind && was.source === block.source) return;
    if (was && update(node, was, block)) return;
    const made = create(block);
    if (node) node.replaceWith(made);
    else place.append(made);
  });
  while (place.childNodes.length > before + blocks.length) place.lastChild.remove();
}

// Changes a node where that is less than making it again; whether it could.
function update(node, was, block) {
  if (was.kind !== block.kind) return false;
  if (block.kind === "code" && was.language === block.language) {
    const shown = node.querySelector("code").firstChild;
    if (block.text.startsWith(was.text)) shown.appendData(block.text.slice(was.text.length));
    else shown.data = block.text;
    return true;
  }
  if (block.kind === "list" && was.isOrdered === block.isOrdered) patch(node, was.blocks, block.blocks);
  else if (block.kind === "quote" || (block.kind === "item" && isLoose(was) && isLoose(block))) patch(node, was.blocks, block.blocks);
  else return false;
  return true;
}

const isLoose = (item) => item.blocks[0]?.kind !== "paragraph" || item.blocks.filter((each) => each.kind === "paragraph").length > 1;

function create(block) {
  switch (block.kind) {
    case "code":
      return code(block);
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.text)); // below the page's own
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(create));
    case "list":
      return element(block.isOrdered ? "ol" : "ul", { start: block.isOrdered && block.start !== 1 ? String(block.start) : null }, ...block.blocks.map(create));
    case "item":
      return isLoose(block) ? element("li", {}, ...block.blocks.map(create)) : element("li", {}, ...inline(block.blocks[0].text), ...block.blocks.slice(1).map(create));
    case "table":
      return tableOf(block);
    default:
      return element("p", {}, ...inline(block.text));
  }
}

function code({ language, text }) {
  const place = element("code", {}, document.createTextNode(text));
  const copying = copyButton(() => place.textContent);
  const head = element("div", { class: "code-head" }, element("span", { text: language || "code" }), copying);
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, place));
}

function tableOf({ head, sides, rows }) {
  const cell = (tag, text, at) => element(tag, { class: sides[at] }, ...inline(text ?? ""));
  const line = (tag, texts) => element("tr", {}, ...sides.map((_, at) => cell(tag, texts[at], at)));
  const body = element("tbody", {}, ...rows.map((row) => line("td", row)));
  return element("div", { class: "table" }, element("table", {}, element("thead", {}, line("th", head)), body));
}
