// The conversation: turns, what is asked of the server for them, and how answers are shown while they come.

import * as api from "./api.js";
import { announce, byId, copyButton, el, iconButton, rate, setText, span, whole } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import * as media from "./media.js";
import * as settings from "./settings.js";

/** Turns: {role: "user", text, media}, {role: "assistant", answers, chosen, stats}, {role: "tool", results: [{id, name, text}]}. */
let turns = [];
let running = null; // an AbortController while answers come
let hooks = { onchange() {}, onproblem() {}, model: () => null };
const views = new WeakMap();

const newAnswer = (label = "") => ({ label, state: "waiting", text: "", reasoning: "", calls: [], finish: null, stats: null, problem: null, warnings: [] });

export function setUp(given) {
  hooks = { ...hooks, ...given };
  const log = byId("turns");
  log.addEventListener("scroll", showToEnd);
  byId("to-end").addEventListener("click", () => scrollToEnd(true));
  render();
}

export const isRunning = () => running !== null;

/** Return the ids of the requests that are being answered. */
export function requestIds() {
  return turns.flatMap((turn) => (turn.answers ?? []).filter(isOpen).map((answer) => answer.requestId));
}

const isOpen = (answer) => answer.state === "waiting" || answer.state === "running";

// ---- kept over a reload ----

/** Return the turns without pictures and sounds, for which browsers have no room. */
export const saved = () => turns.map(({ media: urls, ...turn }) => (urls?.length ? { ...turn, nLost: urls.length } : turn));

export function restore(given) {
  turns = Array.isArray(given) ? given.filter(isTurn) : [];
  for (const answer of turns.flatMap((turn) => turn.answers ?? [])) if (isOpen(answer)) answer.state = "stopped";
  render();
}

function isTurn(turn) {
  const isText = (value) => typeof value === "string";
  if (turn?.role === "user") return isText(turn.text);
  if (turn?.role === "tool") return Array.isArray(turn.results) && turn.results.every(({ id, text }) => isText(id) && isText(text));
  return turn?.role === "assistant" && Array.isArray(turn.answers) && turn.answers.every((answer) => isText(answer?.text) && Array.isArray(answer.calls));
}

// ---- what a user does ----

/** Ask a new question; false where the settings are wrong. */
export function send(text, urls = []) {
  return ask([...turns, { role: "user", text, ...(urls.length ? { media: urls } : {}) }]);
}

export function stop() {
  running?.abort();
}

export function clear() {
  stop();
  running = null;
  turns = [];
  render();
  hooks.onchange();
}

/** Take the conversation up to here, and have it answered. */
function ask(history) {
  let calls;
  try {
    calls = settings.plan();
  } catch (error) {
    if (!(error instanceof settings.SettingError)) throw error;
    hooks.onproblem(error);
    return false;
  }
  stop();
  const answers = calls.flatMap((call) => call.labels.map((label) => newAnswer(label)));
  const turn = { role: "assistant", answers, chosen: 0, stats: null };
  turns = [...history, turn];
  render();
  scrollToEnd(true);
  let first = 0;
  const parts = calls.map((call) => {
    const own = answers.slice(first, (first += call.labels.length));
    return { fields: call.fields, answers: own };
  });
  const messages = messagesOf(history);
  run(turn, parts.map((part) => ({ ...part, messages })));
  return true;
}

function retry(turn) {
  ask(turns.slice(0, turns.indexOf(turn)));
}

/** Let the model write on where an answer has ended. */
function goOn(turn) {
  const answer = turn.answers[turn.chosen];
  let call;
  try {
    [call] = settings.plan();
  } catch (error) {
    hooks.onproblem(error);
    return;
  }
  const { n, ...fields } = call.fields;
  const messages = [...messagesOf(turns.slice(0, turns.indexOf(turn))), { role: "assistant", content: answer.text }];
  Object.assign(answer, { state: "waiting", finish: null, problem: null });
  run(turn, [{ fields, answers: [answer], messages }]);
}

function choose(turn, i) {
  turn.chosen = i;
  viewOf(turn).showAll();
  hooks.onchange();
}

function sendResults(turn, results) {
  ask([...turns.slice(0, turns.indexOf(turn) + 1), { role: "tool", results }]);
}

/** Return the conversation as the server reads it. */
function messagesOf(history) {
  const messages = [];
  const system = settings.systemPrompt();
  if (system) messages.push({ role: "system", content: system });
  for (const turn of history) {
    if (turn.role === "tool") {
      for (const { id, text } of turn.results) messages.push({ role: "tool", tool_call_id: id, content: text });
    } else if (turn.role === "user") {
      const last = messages.at(-1);
      // a question without an answer: templates want the roles in turn
      if (last?.role === "user") last.content = joined(last.content, said(turn));
      else messages.push({ role: "user", content: said(turn) });
    } else {
      const { text, calls } = turn.answers[turn.chosen];
      if (!text && !calls.length) continue;
      const called = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
      messages.push({ role: "assistant", content: text, ...(called.length ? { tool_calls: called } : {}) });
    }
  }
  return messages;
}

const said = ({ text, media: urls }) => (urls?.length ? [...media.partsOf(urls), { type: "text", text }] : text);

function joined(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  return [first, second].flatMap((content) => (typeof content === "string" ? [{ type: "text", text: content }] : content));
}

// ---- asking ----

async function run(turn, parts) {
  const controller = new AbortController();
  running = controller;
  hooks.onchange();
  viewOf(turn).showAll();
  await Promise.all(parts.map((part) => runOne(turn, part, controller.signal)));
  if (running !== controller) return; // something else was asked meanwhile
  running = null;
  viewOf(turn)?.showAll();
  hooks.onchange();
  const problem = turn.answers.find((answer) => answer.problem)?.problem;
  const wasStopped = turn.answers.some((answer) => answer.state === "stopped");
  announce(problem ? `${problem.title}. ${problem.text}` : wasStopped ? "Stopped" : "The answer is complete");
}

async function runOne(turn, { fields, answers, messages }, signal) {
  const model = hooks.model();
  const body = { ...(model ? { model } : {}), messages, ...fields, stream: true, stream_options: { include_usage: true } };
  const show = () => viewOf(turn)?.later();
  try {
    const response = await api.open("v1/chat/completions", { body, signal });
    const id = response.headers.get("x-request-id");
    for (const answer of answers) Object.assign(answer, { requestId: id, state: "running" });
    hooks.onchange();
    show();
    for await (const event of api.events(response)) {
      if (event) take(turn, answers, event);
      show();
    }
    for (const answer of answers) answer.state = "done";
  } catch (error) {
    end(answers, error, signal);
    hooks.onerror?.(error);
  }
  show();
}

function end(answers, error, signal) {
  for (const answer of answers.filter(isOpen)) {
    const isWhole = answer.finish !== null; // of several answers, some may have ended before
    answer.state = signal.aborted ? "stopped" : isWhole ? "done" : "failed";
    if (signal.aborted || isWhole) continue;
    answer.problem = api.inWords(error);
    answer.problem.needsKey = error.status === 401;
  }
}

/** Take what one event says. */
function take(turn, answers, event) {
  for (const choice of event.choices ?? []) {
    const answer = answers[choice.index];
    if (!answer) continue;
    const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta ?? {};
    if (content) answer.text += content;
    if (reasoning) answer.reasoning += reasoning;
    for (const call of calls) takeCall(answer, call);
    if (choice.finish_reason) answer.finish = choice.finish_reason;
  }
  const { finish_reasons: reasons, warnings } = event.cbatch ?? {};
  reasons?.forEach((reason, i) => {
    if (answers[i]) answers[i].finish = reason;
  });
  if (warnings) for (const answer of answers) answer.warnings = warnings;
  if (!event.timings && !event.usage) return;
  const place = answers.length === 1 ? answers[0] : turn;
  place.stats = { ...place.stats, ...event.timings, ...event.usage };
}

function takeCall(answer, { index, id, function: said = {} }) {
  const call = (answer.calls[index] ??= { id: "", name: "", arguments: "" });
  if (id) call.id = id;
  if (said.name) call.name += said.name;
  if (said.arguments) call.arguments += said.arguments;
}

/** Return how many tokens the conversation has, as the server has counted them at the last answer. */
export function usedTokens() {
  for (const turn of [...turns].reverse()) {
    if (turn.role !== "assistant") continue;
    const { stats } = turn.answers[turn.chosen];
    if (stats?.total_tokens) return stats.total_tokens;
    if (turn.stats?.prompt_tokens) return Math.round(turn.stats.prompt_tokens + turn.stats.completion_tokens / turn.answers.length);
  }
  return 0;
}

// ---- showing ----

/** Show all turns; what is seen of those that stay, unfolded thoughts say, stays. */
function render() {
  byId("turns").replaceChildren(...turns.map((turn) => viewOf(turn).node));
  for (const turn of turns) if (turn.role === "assistant") viewOf(turn).showAll();
  byId("chat").classList.toggle("is-empty", turns.length === 0);
  if (!turns.length) byId("turns").append(beginning());
  showToEnd();
}

const EXAMPLES = ["What is 2+3?", "Is this review positive or negative? I love this lamp.", "Tell me a short story about a fox in the desert."];

function beginning() {
  const examples = EXAMPLES.map((text) => el("button", { type: "button", class: "example", onclick: () => send(text) }, text));
  return el(
    "div",
    { class: "beginning" },
    el("p", { class: "big" }, "Ask the model something."),
    el("p", { class: "quiet" }, "Several answers side by side, a system prompt, tools: under Settings. What the slots do meanwhile: under Engine."),
    el("div", { class: "examples" }, ...examples),
  );
}

function viewOf(turn) {
  if (!turns.includes(turn)) return null;
  if (!views.has(turn)) views.set(turn, new (VIEWS[turn.role])(turn));
  return views.get(turn);
}

class UserView {
  constructor(turn) {
    this.turn = turn;
    this.node = el("article", { class: "turn user", "aria-label": "You" });
    this.showAll();
  }

  showAll() {
    const { turn } = this;
    const tools = el(
      "div",
      { class: "tools" },
      copyButton("Copy message", () => turn.text),
      iconButton("edit", "Edit message", () => edit(this.node, turn.text, "Ask again", (text) => this.change(text), () => this.showAll())),
    );
    const { media: urls = [], nLost = 0 } = turn;
    const seen = urls.length > 0 && el("div", { class: "seen" }, ...urls.map(media.shown));
    const lost = nLost > 0 && el("p", { class: "quiet" }, `${whole(nLost)} attachment${nLost === 1 ? " was" : "s were"} not kept over the reload`);
    this.node.replaceChildren(el("div", { class: "said" }, seen, lost, turn.text), tools);
  }

  change(text) {
    ask([...turns.slice(0, turns.indexOf(this.turn)), { ...this.turn, text }]);
  }
}

class ToolView {
  constructor(turn) {
    const results = turn.results.map(({ name, text }) => el("div", { class: "result" }, el("span", { class: "result-name" }, `${name} returned`), el("pre", { tabindex: "0" }, text)));
    this.node = el("article", { class: "turn tool", "aria-label": "Results of tools" }, ...results);
  }
}

/** Put a form in place of a node's content. */
function edit(node, text, name, onsave, oncancel) {
  const area = el("textarea", { "aria-label": "Text", rows: String(Math.min(16, text.split("\n").length + 1)) });
  area.value = text;
  const save = () => {
    if (area.value.trim()) onsave(area.value);
  };
  const close = () => {
    const turn = node.closest(".turn");
    oncancel();
    turn.querySelector("[aria-label^=Edit]")?.focus();
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    event.stopPropagation();
  });
  const buttons = el(
    "div",
    { class: "actions" },
    el("button", { type: "button", class: "plain", onclick: close }, "Cancel"),
    el("button", { type: "button", class: "main", onclick: save }, name),
  );
  node.replaceChildren(el("div", { class: "editor" }, area, buttons));
  area.focus();
}

class AssistantView {
  constructor(turn) {
    this.turn = turn;
    this.group = `turn-${AssistantView.count++}`;
    this.answers = turn.answers.map((answer, i) => new AnswerView(this, answer, i));
    this.grid = el("div", { class: "answers", "data-n": String(Math.min(4, turn.answers.length)) }, ...this.answers.map(({ node }) => node));
    if (turn.answers.length > 1) {
      this.grid.setAttribute("role", "radiogroup");
      this.grid.setAttribute("aria-label", "Answers; the chat goes on with the one that is chosen");
    }
    this.foot = el("p", { class: "stats" });
    this.node = el("article", { class: "turn assistant", "aria-label": "The model" }, this.grid, this.foot);
    this.isDue = false;
    this.tookMs = 0;
    this.showAll();
  }

  /** Show what is new in the next picture, at most a fifth of the time: many events make one. */
  later() {
    if (this.isDue) return;
    this.isDue = true;
    const show = () => {
      const begunMs = performance.now();
      this.isDue = false;
      this.showAll();
      this.tookMs = performance.now() - begunMs;
    };
    const restMs = Math.max(document.hidden ? 250 : 0, 4 * this.tookMs);
    if (restMs > 16) setTimeout(show, restMs);
    else requestAnimationFrame(show);
  }

  showAll() {
    const wasAtEnd = isAtEnd();
    this.node.setAttribute("aria-busy", String(this.turn.answers.some(isOpen)));
    for (const view of this.answers) view.show();
    setText(this.foot, this.turn.stats ? statsOf(this.turn.stats, this.turn.answers.length) : "");
    if (wasAtEnd) scrollToEnd(false);
    else showToEnd();
  }
}

class AnswerView {
  constructor(parent, answer, i) {
    Object.assign(this, { parent, answer, i });
    this.isOne = parent.turn.answers.length === 1;
    this.body = el("div", { class: "body" });
    this.markdown = new MarkdownView(this.body);
    this.reasoning = el("pre", {});
    this.reasoningTitle = el("summary", {});
    this.thoughts = el("details", { class: "thoughts", hidden: true }, this.reasoningTitle, this.reasoning);
    this.calls = el("div", { class: "calls" });
    this.wait = el("p", { class: "wait" });
    this.problem = el("div", { class: "problem", hidden: true });
    this.stats = el("p", { class: "stats" });
    this.tools = el("div", { class: "tools" });
    this.head = this.isOne ? null : this.makeHead();
    this.main = el("div", { class: "content" }, this.thoughts, this.body, this.calls, this.wait);
    this.node = el("section", { class: "answer" }, this.head, this.main, this.problem, el("div", { class: "foot" }, this.stats, this.tools));
  }

  makeHead() {
    const { turn } = this.parent;
    this.radio = el("input", { type: "radio", name: this.parent.group, onchange: () => choose(turn, this.i) });
    return el("label", { class: "choice" }, this.radio, el("span", {}, this.answer.label || `Answer ${this.i + 1}`));
  }

  get isLast() {
    return turns.at(-1) === this.parent.turn;
  }

  show() {
    const { answer } = this;
    const { turn } = this.parent;
    const isChosen = turn.chosen === this.i;
    this.node.dataset.state = answer.state;
    this.node.classList.toggle("is-chosen", !this.isOne && isChosen);
    if (this.radio) this.radio.checked = isChosen;
    this.showReasoning();
    this.markdown.update(answer.text);
    this.showCalls();
    this.showWait();
    this.showProblem();
    setText(this.stats, this.words());
    this.showTools();
  }

  showReasoning() {
    const { reasoning, text, state } = this.answer;
    this.thoughts.hidden = !reasoning;
    if (!reasoning) return;
    const isThinking = state === "running" && !text;
    setText(this.reasoningTitle, isThinking ? "Thinking …" : "Thoughts");
    setText(this.reasoning, reasoning.trim());
  }

  showCalls() {
    const { calls, state } = this.answer;
    const isAsked = this.isLast && state === "done" && this.parent.turn.chosen === this.i;
    const now = `${JSON.stringify(calls)} ${isAsked}`;
    if (this.shownCalls === now) return;
    this.shownCalls = now;
    this.calls.replaceChildren(...calls.filter(Boolean).map(callCard));
    if (calls.length && isAsked) this.calls.append(this.resultForm(calls));
  }

  resultForm(calls) {
    const areas = calls.map(({ name }, i) => el("textarea", { rows: "2", id: `result-${i}`, placeholder: '{"answer": 42}', spellcheck: "false", "aria-label": `Result of ${name}` }));
    const form = el(
      "form",
      { class: "results" },
      el("p", { class: "quiet" }, "The page runs no tools. Write what they return:"),
      ...areas.map((area, i) => el("label", {}, el("span", {}, calls[i].name), area)),
      el("div", { class: "actions" }, el("button", { type: "submit", class: "main" }, areas.length > 1 ? "Send results" : "Send result")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const results = calls.map(({ id, name }, i) => ({ id, name, text: areas[i].value }));
      sendResults(this.parent.turn, results);
    });
    return form;
  }

  showWait() {
    const { state, text, reasoning, calls } = this.answer;
    const hasBegun = text || reasoning || calls.length;
    this.wait.hidden = !isOpen(this.answer) || Boolean(hasBegun);
    setText(this.wait, state === "waiting" ? "waiting for a slot, or for the prompt to be computed" : "computing the prompt");
  }

  showProblem() {
    const { problem } = this.answer;
    this.problem.hidden = !problem;
    if (!problem) return;
    const { turn } = this.parent;
    const canGoOn = this.canGoOn();
    const now = `${problem.title} ${problem.text} ${canGoOn}`;
    if (this.shownProblem === now) return;
    this.shownProblem = now;
    const buttons = [el("button", { type: "button", class: "plain", onclick: () => retry(turn) }, "Try again")];
    if (canGoOn) buttons.push(el("button", { type: "button", class: "plain", onclick: () => goOn(turn) }, "Go on writing"));
    if (problem.needsKey) buttons.unshift(el("button", { type: "button", class: "main", onclick: () => hooks.onkey() }, "Give a key"));
    this.problem.replaceChildren(
      el("p", {}, el("strong", {}, problem.title), problem.text),
      el("div", { class: "actions" }, ...buttons),
    );
  }

  words() {
    const { answer } = this;
    if (isOpen(answer)) return "";
    const words = [answer.stats ? statsOf(answer.stats, 1) : "", ENDS[answer.finish] ?? "", ...answer.warnings];
    if (answer.state === "stopped") words.push("stopped");
    return words.filter(Boolean).join(" · ");
  }

  /** Whether the model may write on where the answer has ended. */
  canGoOn() {
    const { answer } = this;
    const isCut = answer.finish === "length" || answer.state === "stopped" || answer.state === "failed";
    const isChosen = this.parent.turn.chosen === this.i;
    return isCut && !isOpen(answer) && isChosen && this.isLast && answer.text !== "" && !answer.calls.length;
  }

  showTools() {
    const { answer } = this;
    const isStill = !isOpen(answer);
    const canGoOn = this.canGoOn() && !answer.problem;
    const now = `${isStill} ${answer.text !== ""} ${canGoOn} ${answer.problem !== null}`;
    if (this.shownTools === now) return;
    this.shownTools = now;
    const { turn } = this.parent;
    this.tools.replaceChildren();
    if (!isStill) return;
    if (answer.text) {
      this.tools.append(
        copyButton("Copy answer", () => answer.text),
        iconButton("edit", "Edit answer", () => edit(this.main, answer.text, "Save", (text) => this.change(text), () => this.restore())),
      );
    }
    if (answer.problem && !answer.text) return; // which has its own button
    this.tools.append(iconButton("retry", this.isOne ? "Answer anew" : "All answers anew", () => retry(turn)));
    if (canGoOn) this.tools.append(iconButton("next", "Go on writing", () => goOn(turn)));
  }

  change(text) {
    this.answer.text = text;
    this.restore();
    hooks.onchange();
  }

  restore() {
    this.main.replaceChildren(this.thoughts, this.body, this.calls, this.wait);
    this.show();
  }
}
AssistantView.count = 0;

const VIEWS = { user: UserView, assistant: AssistantView, tool: ToolView };

const ENDS = {
  length: "cut at max_tokens",
  window: "the window is full",
  timeout: "the time was over",
  cancelled: "cancelled by the server",
  error: "failed",
};

function callCard({ name, arguments: given }) {
  return el(
    "div",
    { class: "call" },
    el("div", { class: "call-head" }, el("span", {}, "calls ", el("code", {}, name)), copyButton("Copy arguments", () => given)),
    el("pre", { tabindex: "0" }, pretty(given)),
  );
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function statsOf(stats, n) {
  const words = [];
  const tokens = stats.completion_tokens ?? stats.predicted_n;
  if (n > 1) words.push(`${n} answers`);
  if (tokens !== undefined) words.push(`${whole(tokens)} token${tokens === 1 ? "" : "s"}`);
  if (stats.predicted_per_second) words.push(`${rate(stats.predicted_per_second)} tok/s`);
  if (stats.prompt_ms !== undefined) words.push(`first after ${span((stats.queue_ms + stats.prompt_ms) / 1000)}`);
  if (stats.queue_ms > 100) words.push(`${span(stats.queue_ms / 1000)} of it queued`);
  if (stats.cache_n) words.push(`${whole(stats.cache_n)} of ${whole(stats.cache_n + stats.prompt_n)} prompt tokens from cache`);
  if (stats.draft_n) words.push(`${whole(stats.draft_n_accepted)} of ${whole(stats.draft_n)} draft tokens accepted`);
  return words.join(" · ");
}

// ---- scrolling: the end stays in sight while somebody is there ----

function isAtEnd() {
  const log = byId("turns");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function scrollToEnd(isWanted) {
  const log = byId("turns");
  log.scrollTop = log.scrollHeight;
  if (isWanted) showToEnd();
}

function showToEnd() {
  byId("to-end").hidden = isAtEnd() || turns.length === 0;
}
