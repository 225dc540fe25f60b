// The engine as it works: slots as lanes, the queue, curves. Asked of the server every second or two while somebody
// looks, and not at all while the page is hidden.

import * as api from "./api.js";
import { byId, el, rate, setText, span, svg, whole } from "./dom.js";

const SPAN_S = 300; // of the curves
const LANE_S = 60; // of a lane
const RECENT_S = 4;
const N_LANES = 64;
const N_CHIPS = 60;

const lanes = new Map();
let history = []; // one entry an answer of /metrics
let mine = new Set();

/** Tell which requests are this page's own, by their ids. */
export function setMine(ids) {
  mine = new Set(ids);
}

/** Forget what was seen: another engine answers now. */
export function forget() {
  lanes.clear();
  byId("lanes").replaceChildren();
  history = [];
}

/** Ask once, and show. Returns whether anything runs or waits. */
export async function poll(signal) {
  const [slots, text] = await Promise.all([
    api.json("slots", { signal, isPoll: true }).catch((error) => {
      if (error.status === 503) return null; // in a long step: the next answer tells
      throw error;
    }),
    api.open("metrics", { signal, isPoll: true }).then((response) => response.text()),
  ]);
  const now = performance.now() / 1000;
  const figures = figuresOf(text);
  const sample = { ...figures, at: now - figures.age }; // the engine tells them between its runs
  if (slots) showSlots(slots, now);
  showAge(figures.age);
  addSample(sample);
  showQueue(sample, slots?.length ?? lanes.size);
  showCurves();
  showSums(sample);
  return sample.running + sample.waiting + sample.paused > 0;
}

// ---- metrics ----

const LINE = /^cbatch:(\w+)(?:\{(.*)\})? (\S+)$/;

/** Return the figures of a text for Prometheus, of cbatch's own names. */
export function figuresOf(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("cbatch:") && LINE.exec(line);
    if (match) found.set(`${match[1]}${match[2] ? `{${match[2]}}` : ""}`, Number(match[3]));
  }
  const of = (name) => found.get(name) ?? 0;
  const ttft = [];
  for (const [name, value] of found) {
    const match = /^ttft_seconds_bucket\{le="(.+)"\}$/.exec(name);
    if (match) ttft.push([match[1] === "+Inf" ? Infinity : Number(match[1]), value]);
  }
  return {
    age: of("figures_age_seconds"),
    running: of("requests_running"),
    waiting: of("requests_waiting"),
    paused: of("requests_paused"),
    output: of("output_tokens_total"),
    computed: of('prompt_tokens_total{source="computed"}'),
    cached: of('prompt_tokens_total{source="cached"}'),
    cells: of("cells"),
    used: of("cells_used"),
    steps: of("steps_total"),
    preemptions: of("preemptions_total"),
    ttftSum: of("ttft_seconds_sum"),
    ttftCount: of("ttft_seconds_count"),
    ttft,
    finished: [...found].filter(([name]) => name.startsWith("requests_finished_total{")).reduce((sum, [, n]) => sum + n, 0),
  };
}

function addSample(sample) {
  const last = history.at(-1);
  if (last && sample.at - last.at < 0.1) return; // told before
  if (last && (sample.output < last.output || sample.steps < last.steps)) history = []; // it was started anew
  history.push(sample);
  while (history.length > 2 && sample.at - history[1].at > SPAN_S) history.shift();
}

function showAge(seconds) {
  const note = byId("age");
  note.hidden = seconds < 3;
  if (!note.hidden) setText(note, `The engine is in a long step: these figures are ${Math.round(seconds)} s old.`);
}

/** Return points of a rate: the growth of a figure over the time between two answers; null where the page did not look. */
function rates(of) {
  return history.slice(1).map((sample, i) => {
    const before = history[i];
    const seconds = sample.at - before.at;
    return { at: sample.at, value: seconds > 20 ? null : (of(sample) - of(before)) / seconds };
  });
}

const levels = (of) => history.map((sample) => ({ at: sample.at, value: of(sample) }));

function ttftPoints() {
  return history.slice(1).flatMap((sample, i) => {
    const n = sample.ttftCount - history[i].ttftCount;
    return n > 0 ? [{ at: sample.at, value: (sample.ttftSum - history[i].ttftSum) / n }] : [];
  });
}

/** Return the time that a share of the first tokens of the last minutes needed at most, to the buckets' width. */
export function quantile(first, last, share) {
  const counts = last.map(([bound, n], i) => [bound, n - (first[i]?.[1] ?? 0)]);
  const wanted = (counts.at(-1)?.[1] ?? 0) * share;
  if (!wanted) return NaN;
  let [below, nBelow] = [0, 0];
  for (const [bound, n] of counts) {
    if (n >= wanted) return bound === Infinity ? below : below + ((bound - below) * (wanted - nBelow)) / (n - nBelow);
    [below, nBelow] = [bound, n];
  }
  return NaN;
}

// ---- slots ----

function phaseOf(slot) {
  if (slot.status === "paused") return "paused";
  if (!slot.is_processing) return slot.n_cells ? "kept" : "idle";
  return slot.n_prompt_tokens_processed + slot.n_prompt_tokens_cache < slot.n_prompt_tokens ? "prefill" : "decode";
}

function showSlots(slots, now) {
  const shown = slots.slice(0, N_LANES);
  const nBusy = slots.filter(({ status }) => status !== "free").length;
  setText(byId("slots-sum"), `${nBusy} of ${whole(slots.length)} busy`);
  const note = byId("lanes-note");
  note.hidden = slots.length <= N_LANES;
  if (!note.hidden) setText(note, `and ${whole(slots.length - N_LANES)} more`);
  for (const slot of shown) {
    let lane = lanes.get(slot.id);
    if (!lane) {
      lane = new Lane(slot.id);
      lanes.set(slot.id, lane);
      byId("lanes").append(lane.node);
    }
    lane.show(slot, now);
  }
  for (const [id, lane] of lanes) {
    if (id < shown.length) continue;
    lane.node.remove();
    lanes.delete(id);
  }
}

class Lane {
  constructor(id) {
    this.past = []; // {at, phase, task}
    this.counted = null;
    this.speeds = [];
    this.strip = el("canvas", { class: "strip" });
    this.phase = el("span", { class: "phase" });
    this.speed = el("span", { class: "speed" });
    this.cells = el("span", { class: "cells" });
    this.fill = el("i", { class: "fill" });
    this.node = el(
      "li",
      { class: "lane" },
      el("span", { class: "number" }, el("span", { class: "hidden" }, "slot "), String(id)),
      el("span", { class: "track", "aria-hidden": "true" }, this.strip, el("span", { class: "gauge" }, this.fill)),
      this.phase,
      this.speed,
      this.cells,
    );
  }

  show(slot, now) {
    const phase = phaseOf(slot);
    this.past.push({ at: now, phase, task: slot.id_task });
    while (this.past.length > 2 && now - this.past[1].at > LANE_S) this.past.shift();
    this.node.dataset.phase = phase;
    this.node.classList.toggle("is-mine", isMine(slot.id_task));
    this.node.title = isMine(slot.id_task) ? "a request of this page" : "";
    setText(this.phase, this.wordsOf(slot, phase));
    setText(this.speed, this.speedOf(slot, phase, now));
    setText(this.cells, `${whole(slot.n_cells)} / ${whole(slot.n_ctx)}`);
    this.fill.style.setProperty("--part", String(Math.min(1, slot.n_cells / slot.n_ctx)));
    this.draw(now);
  }

  wordsOf(slot, phase) {
    if (phase === "prefill") {
      const done = slot.n_prompt_tokens_processed + slot.n_prompt_tokens_cache;
      return `prefill ${Math.floor((100 * done) / slot.n_prompt_tokens)} %`;
    }
    return phase === "kept" ? "idle" : phase;
  }

  /** Return the rate of this slot's request over its last answers; those that tell nothing new do not count. */
  speedOf(slot, phase, now) {
    const before = this.counted;
    const n = slot.next_token[0].n_decoded + slot.n_prompt_tokens_processed;
    const isSame = before?.task === slot.id_task && before.phase === phase;
    if (phase !== "decode" && phase !== "prefill") {
      this.counted = null;
      return "";
    }
    if (isSame && n === before.n && now - before.now < 5) return this.speed.textContent;
    const speed = isSame ? (n - before.n) / (now - before.now) : 0;
    this.speeds = isSame ? [...this.speeds, speed].slice(-3) : [];
    this.counted = { n, now, phase, task: slot.id_task };
    const mean = this.speeds.reduce((sum, one) => sum + one, 0) / this.speeds.length;
    return mean > 0 ? `${rate(mean)} tok/s` : "";
  }

  draw(now) {
    const { strip } = this;
    const [width, height] = [strip.clientWidth, strip.clientHeight];
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    if (strip.width !== Math.round(width * ratio)) strip.width = Math.round(width * ratio);
    if (strip.height !== Math.round(height * ratio)) strip.height = Math.round(height * ratio);
    const pen = strip.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const x = (at) => Math.round(width * ratio * (1 - (now - at) / LANE_S)) / ratio; // no seams
    this.past.forEach(({ at, phase, task }, i) => {
      const before = this.past[i - 1] ?? { at: at - 1, task };
      if (phase === "idle" || at - before.at > 20) return;
      const left = Math.max(0, x(before.at)) + (task !== before.task ? 1 : 0); // a gap between two requests
      const [top, tall] = phase === "kept" ? [height / 2 - 1, 2] : [0, height];
      pen.fillStyle = colors()[phase];
      pen.fillRect(left, top, x(at) - left, tall);
    });
  }
}

function isMine(task) {
  return typeof task === "string" && mine.has(task.replace(/\[\d+\]$/, ""));
}

let known = null;

/** Return the colours of phases, which the style sheet has. */
function colors() {
  if (!known) {
    const style = getComputedStyle(document.documentElement);
    known = Object.fromEntries(["prefill", "decode", "paused", "kept"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
  }
  return known;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  known = null;
});

// ---- the queue ----

function showQueue(sample, nSlots) {
  const words = [`${whole(sample.running)} running`, `${whole(sample.waiting)} waiting`];
  if (sample.paused) words.push(`${whole(sample.paused)} paused or held`);
  setText(byId("queue-sum"), words.join(" · "));
  const queue = byId("queue");
  const n = Math.min(N_CHIPS, sample.waiting);
  while (queue.childElementCount > n) queue.lastElementChild.remove();
  while (queue.childElementCount < n) queue.append(el("i"));
  queue.dataset.more = sample.waiting > N_CHIPS ? `+${whole(sample.waiting - N_CHIPS)}` : "";
  queue.dataset.empty = sample.waiting ? "" : nSlots && sample.running >= nSlots ? "every slot is busy, nobody waits" : "nobody waits";
}

// ---- curves ----

const CURVES = [
  { id: "output", title: "Tokens written", unit: "tok/s", lines: [["decode", () => rates((s) => s.output)]], words: rate },
  { id: "prompt", title: "Prompt tokens computed", unit: "tok/s", lines: [["prefill", () => rates((s) => s.computed)]], words: rate },
  {
    id: "requests",
    title: "Running and waiting",
    unit: "",
    lines: [["decode", () => levels((s) => s.running)], ["waiting", () => levels((s) => s.waiting)]],
    words: whole,
    names: ["running", "waiting"],
  },
  { id: "ttft", title: "Time to first token", unit: "", lines: [["ink", ttftPoints]], words: span, dots: true },
];

const WIDTH = 240;
const HEIGHT = 62;
const MARGIN = 5; // above the highest level and below the lowest, half a label
const MINUTES = SPAN_S / 60;

/** Return the least round number that is at least this, for the top of an axis; whole numbers have a whole half. */
export function roundTop(most, isWhole) {
  if (!most) return isWhole ? 2 : 1;
  const unit = 10 ** Math.floor(Math.log10(most));
  const top = [1, 2, 4, 6, 8, 10].find((n) => n * unit >= most * 0.999) * unit;
  return isWhole ? Math.max(2, top) : top;
}

function showCurves() {
  const place = byId("curves");
  if (!place.childElementCount) place.append(...CURVES.map((curve) => (curve.view = new Curve(curve)).node));
  for (const { view } of CURVES) view.show();
}

class Curve {
  constructor(curve) {
    this.curve = curve;
    this.now = el("span", { class: "now" });
    this.levels = [2, 1, 0].map(() => el("span"));
    this.readout = el("span", { class: "readout", hidden: true });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const plot = el("div", { class: "plot" }, this.picture, this.readout);
    plot.addEventListener("pointermove", (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.point(null));
    const times = Array.from({ length: MINUTES + 1 }, (_, i) => el("span", {}, i === MINUTES ? "now" : i ? String(i - MINUTES).replace("-", "−") : `−${MINUTES} min`));
    const axes = el(
      "div",
      { class: "axes" },
      el("div", { class: "levels", "aria-hidden": "true" }, ...this.levels),
      plot,
      el("div", { class: "times", "aria-hidden": "true" }, ...times),
    );
    this.node = el("figure", { class: "curve" }, el("figcaption", {}, el("span", {}, curve.title), this.now), axes);
    this.drawn = [];
  }

  show() {
    const { curve } = this;
    this.drawn = curve.lines.map(([, points]) => points());
    const most = Math.max(0, ...this.drawn.flat().map((point) => point.value ?? 0));
    const high = roundTop(most, curve.words === whole);
    const now = history.at(-1).at;
    const x = (at) => WIDTH * (1 - (now - at) / SPAN_S);
    const y = (value) => HEIGHT - MARGIN - (value / high) * (HEIGHT - 2 * MARGIN);
    const parts = this.drawn.flatMap((points, i) => drawing(points, curve.lines[i][0], { x, y, dots: curve.dots }));
    this.picture.replaceChildren(...grid(y, high), ...parts, this.cursor);
    this.levels.forEach((node, i) => setText(node, most || i === 2 ? curve.words((high * (2 - i)) / 2) : ""));
    const last = this.drawn.map((points) => (curve.unit ? recent(points) : points.at(-1)?.value));
    setText(this.now, this.wordsOf(last));
    this.x = x;
  }

  wordsOf(values) {
    const { words, unit, names, id } = this.curve;
    if (names) return values.map((value, i) => `${words(value ?? 0)} ${names[i]}`).join(" · ");
    const tail = id === "ttft" && values[0] !== undefined ? p95() : "";
    return values[0] == null ? "–" : `${words(values[0])}${unit && ` ${unit}`}${tail}`;
  }

  /** Tell the values where the pointer is. */
  point(event) {
    const plot = this.picture.getBoundingClientRect();
    this.readout.hidden = true;
    this.cursor.setAttribute("visibility", "hidden");
    if (!event || !this.x || !this.drawn[0].length) return;
    const at = ((event.clientX - plot.left) / plot.width) * WIDTH;
    const near = this.drawn.map((points) => points.reduce((best, point) => (Math.abs(this.x(point.at) - at) < Math.abs(this.x(best.at) - at) ? point : best)));
    if (near.some((point) => point.value === null)) return;
    const ago = history.at(-1).at - near[0].at;
    const { words, unit, names } = this.curve;
    const values = near.map((point, i) => `${words(point.value)}${names ? ` ${names[i]}` : unit && ` ${unit}`}`);
    this.readout.textContent = `${values.join(", ")}, ${ago < 1 ? "now" : `${Math.round(ago)} s ago`}`;
    this.readout.hidden = false;
    const place = String(this.x(near[0].at));
    this.cursor.setAttribute("x1", place);
    this.cursor.setAttribute("x2", place);
    this.cursor.setAttribute("visibility", "visible");
  }
}

/** Return the mean rate of the last seconds: one look may fall between two long steps. */
function recent(points) {
  const near = points.filter(({ at, value }) => value !== null && points.at(-1).at - at < RECENT_S).map(({ value }) => value);
  return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : undefined;
}

function p95() {
  const first = history[0].ttft;
  const found = quantile(first, history.at(-1).ttft, 0.95);
  return Number.isFinite(found) ? ` · p95 ${span(found)}` : "";
}

/** Return the lines of the axes: three levels, and each minute. */
function grid(y, high) {
  const level = (value) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(value), y2: y(value) });
  const minute = (i) => svg("line", { class: "grid", x1: (WIDTH * i) / MINUTES, x2: (WIDTH * i) / MINUTES, y1: 0, y2: HEIGHT });
  return [...[0, high / 2, high].map(level), ...Array.from({ length: MINUTES - 1 }, (_, i) => minute(i + 1))];
}

/** Return the nodes of a line: an area below it, and dots where there are single values. */
function drawing(points, color, { x, y, dots }) {
  const runs = [[]];
  for (const point of points) {
    if (point.value === null) runs.push([]);
    else runs.at(-1).push(`${x(point.at).toFixed(1)},${y(point.value).toFixed(1)}`);
  }
  const made = [];
  for (const run of runs.filter((run) => run.length)) {
    const [left, right] = [run[0].split(",")[0], run.at(-1).split(",")[0]];
    if (!dots) made.push(svg("path", { class: `area ${color}`, d: `M${left},${HEIGHT - MARGIN} L${run.join(" L")} L${right},${HEIGHT - MARGIN}Z` }));
    made.push(svg("path", { class: `line ${color}`, d: `M${run.join(" L")}` }));
    if (dots) made.push(svg("path", { class: `dots ${color}`, d: run.map((place) => `M${place}h0`).join("") }));
  }
  return made;
}

// ---- sums ----

function showSums(sample) {
  const asked = sample.computed + sample.cached;
  const rows = [
    ["Requests ended", whole(sample.finished)],
    ["Tokens written", whole(sample.output)],
    ["Prompt tokens computed", whole(sample.computed)],
    ["Prompt tokens from cache", asked ? `${whole(sample.cached)} (${Math.round((100 * sample.cached) / asked)} %)` : "0"],
    ["Cells in use", sample.cells ? `${whole(sample.used)} of ${whole(sample.cells)}` : "–"],
    ["Preemptions", whole(sample.preemptions)],
  ];
  const place = byId("sums");
  if (!place.childElementCount) place.append(...rows.map(([name]) => el("div", {}, el("dt", {}, name), el("dd"))));
  rows.forEach(([, value], i) => setText(place.children[i].lastElementChild, value));
}
