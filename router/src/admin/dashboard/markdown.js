// Renders the Markdown of models as elements. Each element is created by itself and all text is a text node, so
// nothing in an answer becomes markup. Only http and https addresses become links.

import { element } from "./dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s{0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_LINE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;

/** Returns the elements of `text`, which may be incomplete, because it is still streaming. */
export function render(text) {
  return blocks(text.split("\n"));
}

function blocks(lines) {
  const made = [];
  for (let i = 0; i < lines.length; ) {
    const [node, next] = block(lines, i);
    if (node) made.push(node);
    i = next;
  }
  return made;
}

/** Returns the block that starts at line `i`, and the index of the line after it. */
function block(lines, i) {
  const line = lines[i];
  let found;
  if (!line.trim()) return [null, i + 1];
  if (FENCE.test(line)) return fence(lines, i);
  if ((found = line.match(HEADING))) {
    return [element(`h${Math.min(6, found[1].length + 2)}`, {}, ...inline(found[2])), i + 1];
  }
  if (RULE.test(line)) return [element("hr"), i + 1];
  if (QUOTE.test(line)) {
    const end = endOf(lines, i, (other) => QUOTE.test(other));
    const inside = lines.slice(i, end).map((quoted) => quoted.replace(QUOTE, ""));
    return [element("blockquote", {}, ...blocks(inside)), end];
  }
  if (ITEM.test(line)) return list(lines, i);
  if (line.includes("|") && TABLE_LINE.test(lines[i + 1] ?? "")) return table(lines, i);
  const end = endOf(lines, i + 1, (other, at) => other.trim() && !begins(lines, at));
  return [element("p", {}, ...broken(lines.slice(i, end))), end];
}

/** Returns whether line `i` starts another block and so ends a paragraph. */
function begins(lines, i) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(lines[i]));
}

function endOf(lines, i, belongs) {
  while (i < lines.length && belongs(lines[i], i)) i++;
  return i;
}

function fence(lines, i) {
  const [, mark, language] = lines[i].match(FENCE);
  const end = endOf(lines, i + 1, (line) => !line.trim().startsWith(mark));
  const code = element("code", { text: lines.slice(i + 1, end).join("\n") });
  const made = element("pre", { tabindex: 0 }, code);
  if (language) made.setAttribute("aria-label", `Code, ${language}`);
  return [made, end + 1];
}

/** Returns a list. Lines indented below an item belong to that item. */
function list(lines, i) {
  const [, indent, mark] = lines[i].match(ITEM);
  const isOrdered = /\d/.test(mark);
  const made = element(isOrdered ? "ol" : "ul");
  if (isOrdered) made.setAttribute("start", parseInt(mark, 10));
  while (i < lines.length) {
    const found = lines[i].match(ITEM);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== isOrdered) break;
    const depth = lines[i].length - found[3].length;
    const isInside = (line, at) =>
      leading(line) > indent.length || (!line.trim() && leading(lines[at + 1] ?? "") > indent.length);
    const end = endOf(lines, i + 1, isInside);
    const inside = lines.slice(i + 1, end).map((line) => line.slice(Math.min(depth, leading(line))));
    made.append(item(found[3], inside));
    i = endOf(lines, end, (line, at) => !line.trim() && ITEM.test(lines[at + 1] ?? ""));
  }
  return [made, i];
}

function item(text, inside) {
  return element("li", {}, ...inline(text), ...blocks(inside));
}

const leading = (line) => (line.trim() ? line.length - line.trimStart().length : 0);

function table(lines, i) {
  const row = (line, name) => {
    const cells = line.trim().replace(/^\||\|$/g, "").split("|");
    return element("tr", {}, ...cells.map((text) => element(name, {}, ...inline(text.trim()))));
  };
  const end = endOf(lines, i + 2, (line) => line.includes("|"));
  const head = element("thead", {}, row(lines[i], "th"));
  const body = element("tbody", {}, ...lines.slice(i + 2, end).map((line) => row(line, "td")));
  return [element("div", { className: "scroll" }, element("table", {}, head, body)), end];
}

/** Returns the lines of a paragraph with a line break between them. */
function broken(lines) {
  return lines.flatMap((line, i) => [...(i ? [element("br")] : []), ...inline(line)]);
}

const INLINE = [
  [/`([^`]+)`/, (found) => element("code", { text: found[1] })],
  [/\*\*(?=\S)(.+?)\*\*/, (found) => element("strong", {}, ...inline(found[1]))],
  [/~~(?=\S)(.+?)~~/, (found) => element("del", {}, ...inline(found[1]))],
  [/(?<![\w*])\*(?=[^\s*])(.+?)(?<=\S)\*(?![\w*])/, (found) => element("em", {}, ...inline(found[1]))],
  [/(?<!\w)_(?=\S)(.+?)(?<=\S)_(?!\w)/, (found) => element("em", {}, ...inline(found[1]))],
  [/\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/, (found) => link(found[2], inline(found[1]))],
  [/https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"]/, (found) => link(found[0], [found[0]])],
];

function link(href, children) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** Returns the nodes of one line: the text before the first inline pattern, the pattern, and the rest. */
function inline(text) {
  const nodes = [];
  while (text) {
    let first = null;
    for (const [pattern, make] of INLINE) {
      const found = text.match(pattern);
      if (found && (first === null || found.index < first.found.index)) first = { found, make };
    }
    if (first === null) break;
    const { found, make } = first;
    nodes.push(text.slice(0, found.index), make(found));
    text = text.slice(found.index + found[0].length);
  }
  return [...nodes, text].filter((node) => node !== "");
}
