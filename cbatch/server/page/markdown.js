// Markdown as nodes. marked.js reads the text, and nodes are made of its tokens here: no string becomes markup, HTML in
// an answer stays text, pictures become links, and links lead to http, https and mailto alone.

import { copyButton, el } from "./dom.js";
import { Lexer, Tokenizer } from "./marked.js";

// Limits keep the page responsive whatever an answer holds.
const N_PLAIN = 10000; // characters; a longer paragraph, item or cell is shown as it is
const N_EMPHASIS = 500; // characters between two marks of emphasis
const MAX_DEPTH = 6; // of lists and quotes inside each other

class PlainLexer extends Lexer {
  inlineTokens(text, tokens = []) {
    if (text.length <= N_PLAIN) return super.inlineTokens(text, tokens);
    tokens.push({ type: "text", raw: text, text });
    return tokens;
  }
}

/** Knows no HTML, and no link whose address stands elsewhere in the text. */
class PlainTokenizer extends Tokenizer {
  depth = 0;

  html() {}

  tag() {}

  def() {}

  blockquote(text) {
    this.lexer.state.lastToken = undefined; // marked takes the text before the quote for text before a list in it
    return this.nested("blockquote", text);
  }

  list(text) {
    return this.nested("list", text);
  }

  emStrong(text, masked, before) {
    const nCut = Math.max(0, text.length - N_EMPHASIS);
    return super.emStrong(text.slice(0, N_EMPHASIS), masked.slice(0, masked.length - nCut), before);
  }

  nested(kind, text) {
    if (this.depth === MAX_DEPTH) return undefined;
    this.depth += 1;
    const token = super[kind](text);
    this.depth -= 1;
    return token;
  }
}

const tokensOf = (text) => new PlainLexer({ gfm: true, tokenizer: new PlainTokenizer() }).lex(text);

/** Shows a text that grows; finished blocks are not made again. */
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.blocks = []; // place and token, as JSON, of the block at each child of the node
  }

  update(given) {
    const text = given.replace(/\r\n?/g, "\n");
    const nKept = text.startsWith(this.text) ? this.nFinal() : 0;
    let start = nKept ? this.blocks[nKept].start : 0;
    const blocks = this.blocks.slice(0, nKept);
    for (const token of tokensOf(text.slice(start))) {
      if (token.type !== "space") this.show(blocks, { start, json: JSON.stringify(token) }, token);
      start += token.raw.length;
    }
    while (this.node.childNodes.length > blocks.length) this.node.lastChild.remove();
    this.text = text;
    this.blocks = blocks;
  }

  /** Count the blocks that no added text changes: a block goes on past a blank line, but never past a block of others. */
  nFinal() {
    const isApart = ({ start }) => /(^|\n)[ \t]*\n$/.test(this.text.slice(0, start));
    const last = this.blocks.findLastIndex(isApart);
    return Math.max(0, this.blocks.slice(0, Math.max(0, last)).findLastIndex(isApart));
  }

  show(blocks, block, token) {
    const i = blocks.push(block) - 1;
    if (this.blocks[i]?.json === block.json) return;
    const node = token.type === "text" ? el("p", {}, nodeOf(token)) : nodeOf(token);
    if (this.node.childNodes[i]) this.node.childNodes[i].replaceWith(node);
    else this.node.append(node);
  }
}

const nodeOf = (token) => MAKES[token.type]?.(token) ?? token.raw;

const inside = (token) => token.tokens.map(nodeOf);

const wrapped = (tag) => (token) => el(tag, {}, ...inside(token));

const MAKES = {
  paragraph: wrapped("p"),
  blockquote: wrapped("blockquote"),
  strong: wrapped("strong"),
  em: wrapped("em"),
  del: wrapped("del"),
  heading: (token) => el(`h${Math.min(6, token.depth + 2)}`, {}, ...inside(token)),
  hr: () => el("hr"),
  space: () => "",
  br: () => "\n",
  escape: (token) => token.text,
  codespan: (token) => el("code", {}, token.text),
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
  link: (token) => linkTo(token.href, inside(token)),
  image: (token) => linkTo(token.href, [token.text || token.href]),
  text(token) {
    if (!token.tokens) return token.text;
    const node = document.createDocumentFragment();
    node.append(...inside(token));
    return node;
  },
  code({ text, lang }) {
    const language = lang?.split(/\s/)[0].slice(0, 30);
    return el(
      "div",
      { class: "code" },
      el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy code", () => text)),
      el("pre", { tabindex: "0" }, el("code", {}, text)),
    );
  },
  list({ ordered, start, items }) {
    return el(ordered ? "ol" : "ul", { start: ordered ? String(start) : null }, ...items.map(wrapped("li")));
  },
  table({ header, rows }) {
    const row = (cells, tag) => el("tr", {}, ...cells.map((cell) => el(tag, { "data-align": cell.align }, ...inside(cell))));
    const body = rows.map((cells) => row(cells, "td"));
    const table = el("table", {}, el("thead", {}, row(header, "th")), el("tbody", {}, ...body));
    return el("div", { class: "scroll", tabindex: "0" }, table);
  },
};

/** Return a link, or null if the address is not one for a reader to follow. */
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
