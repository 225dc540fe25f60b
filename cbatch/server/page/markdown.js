// Markdown, the part of it that models write, as nodes. Text stays text: no markup of an answer is taken over, pictures
// are not loaded, and links lead to http, https and mailto alone.

import { copyButton, el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const QUOTE = /^ {0,3}>[ ]?(.*)$/;

// What is looked at has a limit everywhere: an answer may be made to keep the page busy.
const N_PLAIN = 20000; // a longer paragraph, item or cell is shown as it is
const N_LABEL = 500;
const N_ADDRESS = 2000;
const MAX_DEPTH = 6;

/** Shows a text that grows; blocks that are as they were stay as they are. */
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  update(text) {
    const blocks = blocksOf(text.split("\n"));
    let same = 0;
    while (same < blocks.length && same < this.sources.length && this.sources[same] === blocks[same].source) same += 1;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    for (const block of blocks.slice(same)) this.node.append(nodeOf(block, 0));
    this.sources = blocks.map((block) => block.source);
  }
}

function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const start = at;
    const kind = kindOf(lines, at);
    at = ENDS[kind](lines, at);
    const own = lines.slice(start, at);
    blocks.push({ kind, lines: own, source: `${kind}\n${own.join("\n")}` });
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && isDelimiterRow(lines[at + 1] ?? "")) return "table";
  return "paragraph";
}

function isDelimiterRow(line) {
  return line.includes("-") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
}

const oneLine = (lines, at) => at + 1;

const ENDS = {
  heading: oneLine,
  rule: oneLine,
  fence(lines, at) {
    const mark = FENCE.exec(lines[at])[1];
    for (let i = at + 1; i < lines.length; i += 1) {
      const line = lines[i].trim();
      if (line.length >= mark.length && line === mark[0].repeat(line.length)) return i + 1;
    }
    return lines.length;
  },
  quote(lines, at) {
    let end = at + 1;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return end;
  },
  list(lines, at) {
    let end = at + 1;
    for (let i = at + 1; i < lines.length; i += 1) {
      if (ITEM.test(lines[i]) || (/^[ \t]+\S/.test(lines[i]) && !RULE.test(lines[i]))) end = i + 1;
      else if (lines[i].trim() || !ITEM.test(lines[i + 1] ?? "")) {
        if (lines[i].trim() || !/^[ \t]+\S/.test(lines[i + 1] ?? "")) break;
      }
    }
    return end;
  },
  table(lines, at) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
    return end;
  },
  paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && kindOf(lines, end) === "paragraph") end += 1;
    return end;
  },
};

function nodeOf(block, depth) {
  return MAKES[block.kind](block.lines, depth);
}

const MAKES = {
  heading(lines) {
    const [, marks, rest] = HEADING.exec(lines[0]);
    const text = rest.trim();
    const bare = withoutEnd(text, "#");
    return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(/\s$/.test(bare.slice(-1)) ? bare.trimEnd() : text));
  },
  rule: () => el("hr"),
  fence(lines) {
    const [, mark, info] = FENCE.exec(lines[0]);
    const last = lines.at(-1).trim();
    const isClosed = lines.length > 1 && last.length >= mark.length && last === mark[0].repeat(last.length);
    const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    const language = info.trim().split(/\s/)[0].slice(0, 30);
    return el(
      "div",
      { class: "code" },
      el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy code", () => text)),
      el("pre", { tabindex: "0" }, el("code", {}, text)),
    );
  },
  quote(lines, depth) {
    const inner = lines.map((line) => QUOTE.exec(line)[1]);
    if (depth >= MAX_DEPTH) return el("blockquote", {}, inner.join("\n"));
    return el("blockquote", {}, ...blocksOf(inner).map((block) => nodeOf(block, depth + 1)));
  },
  list(lines) {
    return listOf(lines);
  },
  table(lines) {
    const align = cells(lines[1]).map((cell) => (/^:.*:$/.test(cell) ? "center" : cell.endsWith(":") ? "right" : null));
    const row = (line, tag) => {
      const made = cells(line).slice(0, 64).map((cell, i) => el(tag, { "data-align": align[i] }, ...inline(cell)));
      return el("tr", {}, ...made);
    };
    const body = lines.slice(2).map((line) => row(line, "td"));
    const table = el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body));
    return el("div", { class: "scroll", tabindex: "0" }, table);
  },
  paragraph(lines) {
    const text = lines.map((line) => line.trimEnd()).join("\n");
    return el("p", {}, ...inline(text));
  },
};

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}

/** Return a list, with lists inside by their indentation. */
function listOf(lines) {
  const stack = [];
  let item = null;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (!found) {
      if (line.trim()) item.append("\n", ...inline(line.trim()));
      continue;
    }
    const indent = found[1].replaceAll("\t", "    ").length;
    while (stack.length > 1 && indent < stack.at(-1).indent) stack.pop();
    if (!stack.length || (indent > stack.at(-1).indent + 1 && stack.length < MAX_DEPTH)) {
      const isOrdered = /\d/.test(found[2]);
      const list = el(isOrdered ? "ol" : "ul", { start: isOrdered ? String(parseInt(found[2], 10)) : null });
      item?.append(list);
      stack.push({ indent, list });
    }
    item = el("li", {}, ...inline(found[3]));
    stack.at(-1).list.append(item);
  }
  return stack[0].list;
}

// ---- inside a line ----

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const N_TRIES = 8; // closing marks that are looked at: text of stars alone stays cheap

/** Return the nodes of a text. */
export function inline(text, depth = 0) {
  if (text.length > N_PLAIN) return [text];
  const nodes = [];
  const missing = new Set();
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  let at = 0;
  while (at < text.length) {
    const found = depth < MAX_DEPTH ? spanAt(text, at, missing, depth) : null;
    if (found) {
      flush();
      nodes.push(found.node);
      at = found.end;
    } else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return nodes;
}

function spanAt(text, at, missing, depth) {
  const c = text[at];
  if (c === "`") return codeAt(text, at, missing);
  if (c === "[") return linkAt(text, at);
  if (c === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? "")) return addressAt(text, at);
  if (c !== "*" && c !== "_" && c !== "~") return null;
  const mark = MARKS.find(([mark]) => text.startsWith(mark, at));
  return mark ? emphasisAt(text, at, mark, missing, depth) : null;
}

function codeAt(text, at, missing) {
  let n = 1;
  while (text[at + n] === "`") n += 1;
  const mark = "`".repeat(n);
  if (missing.has(mark)) return null;
  const end = text.indexOf(mark, at + n);
  if (end < 0) {
    missing.add(mark);
    return null;
  }
  return { node: el("code", {}, text.slice(at + n, end).trim()), end: end + n };
}

function linkAt(text, at) {
  const label = before(text.slice(at + 1, at + 1 + N_LABEL), "](");
  if (label === null || label.includes("[")) return null;
  const start = at + label.length + 3;
  const inside = before(text.slice(start, start + N_ADDRESS), ")");
  const link = inside === null ? null : linkTo(inside.trim().split(/\s/)[0], [label]);
  return link && { node: link, end: start + inside.length + 1 };
}

function addressAt(text, at) {
  const address = withoutEnd(/^[^\s<>"`]+/.exec(text.slice(at, at + N_ADDRESS))[0], ")]}*_~.,;:!?'’");
  const link = linkTo(address, [address]);
  return link && { node: link, end: at + address.length };
}

/** Return what stands before a mark; null where that is missing. */
function before(text, mark) {
  const end = text.indexOf(mark);
  return end < 0 ? null : text.slice(0, end);
}

/** Return a text without the characters at its end that are among these. */
function withoutEnd(text, characters) {
  let end = text.length;
  while (end && characters.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

function linkTo(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...children);
}

function emphasisAt(text, at, [mark, tag], missing, depth) {
  const start = at + mark.length;
  if (missing.has(mark) || /\s/.test(text[start] ?? " ")) return null;
  if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) return null;
  let end = start;
  for (let i = 0; i < N_TRIES; i += 1) {
    end = text.indexOf(mark, end + 1);
    if (end < 0) {
      if (i === 0) missing.add(mark);
      return null;
    }
    const isClosing = !/\s/.test(text[end - 1]) && (mark[0] !== "_" || !/\w/.test(text[end + mark.length] ?? ""));
    const isOther = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    if (isClosing && !isOther) {
      return { node: el(tag, {}, ...inline(text.slice(start, end), depth + 1)), end: end + mark.length };
    }
  }
  return null;
}
