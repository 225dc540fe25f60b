// Nodes are made here, and text goes into them as text: no string becomes markup anywhere on this page.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Return a new element; attributes that begin with "on" are listeners, false and null are left out. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Return a new element of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

const PATHS = {
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  remove: "M6 6l12 12M18 6L6 18",
  next: "M5 5v14M10 6l9 6-9 6z",
};

/** Return a button with a picture; its name is read aloud and shown on hovering. */
export function iconButton(icon, name, onclick, more = {}) {
  const picture = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: PATHS[icon] }));
  return el("button", { type: "button", class: "icon", "aria-label": name, title: name, onclick, ...more }, picture);
}

/** Show or hide, and change text only where it differs: what is read aloud stays still. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Say something to a screen reader. */
export function announce(text) {
  byId("said").textContent = text;
}

/** Put text in the clipboard, also where the page has no right to: without https, browsers give none. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "hidden", readonly: true });
    area.value = text;
    const before = document.activeElement;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    before?.focus();
  }
}

/** Return a button that copies, and says so. */
export function copyButton(name, textOf) {
  const button = iconButton("copy", name, async () => {
    await copy(textOf());
    const path = button.querySelector("path");
    path.setAttribute("d", PATHS.check);
    announce("Copied");
    setTimeout(() => path.setAttribute("d", PATHS.copy), 1500);
  });
  return button;
}

const WHOLE = new Intl.NumberFormat("en");

/** Return a count with separators. */
export const whole = (n) => WHOLE.format(Math.round(n));

/** Return a rate in three digits or so. */
export function rate(n) {
  if (!Number.isFinite(n)) return "–";
  return n >= 100 || n === 0 ? whole(n) : n.toFixed(n >= 10 ? 0 : 1);
}

/** Return a span of time. */
export function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 10 ? `${seconds.toFixed(2)} s` : `${whole(seconds)} s`;
}
