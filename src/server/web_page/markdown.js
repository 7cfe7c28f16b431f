// Markdown to elements. No HTML passes through: everything that is not a known construct stays text. Images become
// links, since the page loads nothing from other hosts.

import { copy, el } from "./dom.js";

/** Nesting of quotes and lists beyond which text is taken as it is. */
const DEPTH_MAX = 8;

/** Length of a line beyond which it is plain text, because matching it would take long. */
const LINE_MAX = 2000;

/**
 * Shows markdown in an element, keeping the elements of leading blocks that have not changed, so that an answer that
 * grows is not built anew for each token.
 */
export function render(target, source) {
  const blocks = splitBlocks(source);
  const before = target.renderedBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < before.length && before[same] === blocks[same]) same++;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const block of blocks.slice(same)) target.append(blockElement(block, 0));
  target.renderedBlocks = blocks;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const LIST = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** Splits a text into blocks: paragraphs, lists, code, quotes, tables, headings and rules. */
export function splitBlocks(source) {
  const lines = source.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].length > LINE_MAX) {
      blocks.push(lines[at++]);
      continue;
    }
    if (lines[at].trim() === "") {
      at++;
      continue;
    }
    const end = blockEnd(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

function blockEnd(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenceEnd(lines, at, fence[1]);
  if (HEADING.test(line) || RULE.test(line)) return at + 1;
  let end = at + 1;
  if (QUOTE.test(line)) {
    while (end < lines.length && (QUOTE.test(lines[end]) || isPlain(lines[end]))) end++;
    return end;
  }
  if (LIST.test(line)) return listEnd(lines, at);
  while (end < lines.length && !startsBlock(lines[end])) end++;
  return end;
}

function fenceEnd(lines, at, mark) {
  const closes = (line) => {
    const text = line.trim();
    return text.length >= mark.length && text === mark[0].repeat(text.length);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end++;
  return Math.min(end + 1, lines.length);
}

function listEnd(lines, at) {
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    const fence = FENCE.exec(line.trimStart());
    if (fence && /^ {2,}/.test(line)) {
      end = fenceEnd(lines, end, fence[1]);
    } else if (line.trim() === "") {
      // A blank line ends a list, unless the next line belongs to an item.
      if (end + 1 >= lines.length || !(LIST.test(lines[end + 1]) || /^ {2,}\S/.test(lines[end + 1]))) return end;
      end++;
    } else if (LIST.test(line) || /^ {2,}/.test(line) || isPlain(line)) {
      end++;
    } else {
      return end;
    }
  }
  return end;
}

function startsBlock(line) {
  return (
    line.length > LINE_MAX ||
    line.trim() === "" || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || LIST.test(line)
  );
}

function isPlain(line) {
  return !startsBlock(line);
}

function blockElement(block, depth) {
  const lines = block.split("\n");
  if (lines[0].length > LINE_MAX) return el("p", {}, block);
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeBlock(lines, fence);
  const heading = lines.length === 1 && HEADING.exec(lines[0]);
  if (heading) return withInline(el(`h${Math.min(heading[1].length + 2, 6)}`), heading[2] ?? "");
  if (lines.length === 1 && RULE.test(lines[0])) return el("hr");
  if (QUOTE.test(lines[0])) return nested(el("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth);
  if (LIST.test(lines[0])) return list(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && TABLE_RULE.test(lines[1])) return table(lines);
  return paragraph(lines);
}

function nested(target, lines, depth) {
  const text = lines.join("\n");
  if (depth >= DEPTH_MAX) {
    target.append(text);
    return target;
  }
  for (const block of splitBlocks(text)) target.append(blockElement(block, depth + 1));
  return target;
}

function codeBlock(lines, [, mark, language]) {
  const last = lines[lines.length - 1].trim();
  const isClosed = lines.length > 1 && last.length >= mark.length && last === mark[0].repeat(last.length);
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const button = el("button", { type: "button", class: "quiet copy", click: () => copy(text, button) }, "Copy");
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), button);
  const code = el("pre", { tabindex: "0", role: "group", dir: "ltr", "aria-label": `Code, ${language || "text"}` }, el("code", {}, text));
  return el("div", { class: "code" }, head, code);
}

function list(lines, depth) {
  const [, , mark] = LIST.exec(lines[0]);
  const isOrdered = /\d/.test(mark);
  const start = isOrdered ? parseInt(mark, 10) : 1;
  const target = el(isOrdered ? "ol" : "ul", { start: start === 1 ? null : start });
  let item = null;
  let indent = 0;
  const finish = () => item && target.append(listItem(item, depth));
  for (const line of lines) {
    const found = LIST.exec(line);
    const isItem = found && (item === null || found[1].length < Math.max(indent, 2));
    if (isItem) {
      finish();
      indent = found[0].length;
      item = [line.slice(found[0].length)];
    } else {
      const spaces = /^ */.exec(line)[0].length;
      item.push(line.slice(Math.min(spaces, Math.max(indent, 2))));
    }
  }
  finish();
  return target;
}

function listItem(lines, depth) {
  const item = nested(el("li"), lines, depth);
  // A single paragraph needs no element of its own.
  const first = item.firstChild;
  if (first && first.nodeName === "P") first.replaceWith(...first.childNodes);
  return item;
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function table(lines) {
  const head = el("tr", {}, ...cells(lines[0]).map((cell) => withInline(el("th", { scope: "col" }), cell)));
  const row = (line) => el("tr", {}, ...cells(line).map((cell) => withInline(el("td"), cell)));
  const body = el("tbody", {}, ...lines.slice(2).map(row));
  const whole = el("table", {}, el("thead", {}, head), body);
  return el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, whole);
}

function paragraph(lines) {
  const target = el("p");
  lines.forEach((line, number) => {
    const isBroken = number > 0 && (lines[number - 1].endsWith("  ") || lines[number - 1].endsWith("\\"));
    if (number > 0) target.append(isBroken ? el("br") : "\n");
    withInline(target, (line.endsWith("\\") ? line.slice(0, -1) : line).trim());
  });
  return target;
}

const INLINE =
  /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|\*(?=[^\s*])([^*]*[^\s*])\*|(?<!\w)_(?=[^\s_])([^_]*[^\s_])_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|!?\[([^\[\]]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)|(https?:\/\/[^\s<>()"'`]+[^\s<>()"'`.,;:!?])|\\([!-\/:-@\[-`{-~])/;

/** Appends text with emphasis, code and links to an element. */
export function withInline(target, text, depth = 0) {
  let rest = text;
  while (rest) {
    const found = depth > DEPTH_MAX || text.length > LINE_MAX ? null : INLINE.exec(rest);
    if (!found) break;
    if (found.index > 0) target.append(rest.slice(0, found.index));
    const [all, , code, strong, strong2, emphasis, emphasis2, strike, label, address, bare, escaped] = found;
    if (code !== undefined) target.append(el("code", {}, code.replace(/^ (.*\S.*) $/, "$1")));
    else if (strong ?? strong2) target.append(withInline(el("strong"), strong ?? strong2, depth + 1));
    else if (emphasis ?? emphasis2) target.append(withInline(el("em"), emphasis ?? emphasis2, depth + 1));
    else if (strike) target.append(withInline(el("s"), strike, depth + 1));
    else if (address !== undefined) target.append(link(address, label || address, all));
    else if (bare) target.append(link(bare, bare, all));
    else target.append(escaped);
    rest = rest.slice(found.index + all.length);
  }
  if (rest) target.append(rest);
  return target;
}

/** Returns a link to a web page or mail address; any other address stays text. */
function link(address, label, all) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return document.createTextNode(all);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(all);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}
