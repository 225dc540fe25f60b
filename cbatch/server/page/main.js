// The page: its parts side by side or one at a time, the connection, the key, and what is kept over a reload.

import * as api from "./api.js";
import * as chat from "./chat.js";
import { announce, byId, el, setText, whole } from "./dom.js";
import * as kept from "./kept.js";
import * as live from "./live.js";
import * as media from "./media.js";
import * as settings from "./settings.js";

const BUSY_S = 1;
const IDLE_S = 3;
const UNSEEN_S = 15; // only whether the server is there
const RETRY_S = [1, 2, 4, 8, 15];
const N_HEALTH = 5; // looks at the engine between two questions for health
const PATIENCE_MS = 10000;

const wide = matchMedia("(min-width: 1180px)");
const narrow = matchMedia("(max-width: 759px)");

let facts = null; // of /props

// ---- what is seen ----

const isOn = (view) => document.body.dataset[view] === "on";

function show(view, isShown) {
  document.body.dataset[view] = isShown ? "on" : "off";
}

function press(view) {
  if (view === "chat") {
    show("settings", false);
    show("engine", false);
  } else {
    const isShown = !isOn(view) || narrow.matches;
    if (isShown && !wide.matches) show(view === "settings" ? "engine" : "settings", false);
    show(view, isShown);
  }
  showPressed();
  if (narrow.matches) byId(view).focus({ preventScroll: true });
  wake();
}

function showPressed() {
  for (const button of document.querySelectorAll("[data-view]")) {
    const { view } = button.dataset;
    const isPressed = view === "chat" ? !isOn("settings") && !isOn("engine") : isOn(view);
    button.setAttribute("aria-pressed", String(isPressed));
  }
}

function fit() {
  if (wide.matches) show("engine", true);
  else if (narrow.matches || (isOn("settings") && isOn("engine"))) {
    show("settings", false);
    if (narrow.matches) show("engine", false);
  }
  showPressed();
  wake();
}

// ---- the connection ----

let timer = null;
let isPolling = false;
let mustWake = false;
let nFailed = 0;
let nLooks = 0;
let isLocked = false; // a key is wanted

function setStatus(state, text) {
  byId("status").dataset.state = state;
  setText(byId("status-text"), text);
}

function wake() {
  if (isPolling) {
    mustWake = true;
    return;
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(look, 0);
}

/** Look at the server once, and say when to look again. */
async function look() {
  if (isPolling || document.hidden || isLocked) return;
  isPolling = true;
  mustWake = false;
  let seconds = IDLE_S;
  try {
    seconds = await lookOnce();
  } catch (error) {
    seconds = failed(error);
  } finally {
    isPolling = false;
  }
  clearTimeout(timer);
  if (seconds !== null && !document.hidden) timer = setTimeout(look, mustWake ? 0 : seconds * 1000);
}

async function lookOnce() {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const isSeen = isOn("engine");
  if (!facts || nFailed) await meet(signal);
  let isBusy = chat.isRunning();
  live.setMine(chat.requestIds());
  if (isSeen) isBusy = (await live.poll(signal)) || isBusy;
  nLooks += 1;
  if (!isSeen || nFailed || nLooks % N_HEALTH === 1) await api.json("health", { signal });
  if (nFailed) announce("The server is back");
  nFailed = 0;
  setStatus("well", "connected");
  if (!isSeen) return UNSEEN_S;
  return isBusy ? BUSY_S : IDLE_S;
}

function failed(error) {
  if (error.status === 401) {
    isLocked = true;
    setStatus("wait", "locked");
    askKey(api.key() ? "The server does not take this key." : "");
    return null;
  }
  const seconds = RETRY_S[Math.min(nFailed, RETRY_S.length - 1)];
  nFailed += 1;
  const isThere = error.status > 0 && error.status !== 502 && error.status !== 504;
  const words = error.code === "shutting_down" || /shutting down/.test(error.message) ? "shutting down" : isThere ? "not well" : "unreachable";
  setStatus("bad", words);
  byId("status").title = isThere ? error.message : "The page goes on trying.";
  return seconds;
}

/** Ask what the server is. */
async function meet(signal) {
  const [found, models] = await Promise.all([api.json("props", { signal }), api.json("v1/models", { signal })]);
  const isNew = !facts || facts.build_info !== found.build_info || facts.model_alias !== found.model_alias;
  if (isNew || facts.total_slots !== found.total_slots) live.forget();
  facts = found;
  byId("status").title = "";
  const { n_ctx: window, params = {} } = found.default_generation_settings ?? {};
  const names = models.data.map(({ id }) => String(id));
  byId("model-name").title = String(found.model_path ?? "");
  setText(byId("model-size"), `${whole(found.total_slots)} slot${found.total_slots === 1 ? "" : "s"} of ${whole(window)} tokens`);
  byId("model-size").title = String(found.build_info);
  document.title = `${found.model_alias} · cbatch`;
  const select = byId("model");
  const before = select.value;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  if (names.includes(before)) select.value = before;
  byId("model-row").hidden = names.length < 2;
  const can = models.data[0]?.capabilities ?? [];
  const question = byId("question");
  question.disabled = can.length > 0 && !can.includes("completion");
  question.placeholder = question.disabled ? `This model does not answer: it is for ${can.join(" and ")}` : "Ask the model";
  showModel();
  settings.showDefaults(params, found.chat_template);
  media.allow(found.modalities);
  byId("key-open").hidden = !api.key();
  showRoom();
}

/** Show whose answers come: the model's, or an adapter's. */
function showModel() {
  const alias = String(facts.model_alias);
  const chosen = byId("model").value;
  setText(byId("model-name"), chosen === alias || !chosen ? alias : `${alias} · ${chosen}`);
}

// ---- the key ----

function askKey(problem) {
  const dialog = byId("key-dialog");
  byId("key-open").hidden = false;
  const shown = byId("key-problem");
  shown.hidden = !problem;
  shown.textContent = problem;
  byId("key").setAttribute("aria-invalid", String(Boolean(problem)));
  if (!dialog.open) dialog.showModal();
  byId("key").value = "";
  byId("key").focus();
}

async function takeKey(event) {
  event.preventDefault();
  const value = byId("key").value.trim();
  // what a header cannot have is no key
  if (!/^[\x21-\x7e]+$/.test(value)) {
    askKey(value ? "A key has no spaces and no letters beyond ASCII." : "Write the key here.");
    return;
  }
  try {
    await api.json("v1/models", { key: value });
  } catch (error) {
    const { title, text } = api.inWords(error);
    askKey(error.status === 401 ? "The server does not take this key." : `${title}. ${text}`);
    return;
  }
  api.setKey(value);
  byId("key-dialog").close();
  isLocked = false;
  wake();
  byId("question").focus();
}

// ---- the composer ----

const touch = matchMedia("(pointer: coarse)");

function grow() {
  const area = byId("question");
  area.style.setProperty("height", "auto");
  area.style.setProperty("height", `${Math.min(area.scrollHeight, 240)}px`);
}

function submit(event) {
  event?.preventDefault();
  const area = byId("question");
  const text = area.value.trim();
  if (!text || chat.isRunning()) return;
  const urls = media.take();
  if (!chat.send(text, urls)) {
    media.giveBack(urls);
    return;
  }
  area.value = "";
  grow();
}

function showComposer() {
  const isRunning = chat.isRunning();
  const hadFocus = document.activeElement === byId("stop-button");
  byId("send").hidden = isRunning;
  byId("stop-button").hidden = !isRunning;
  if (hadFocus && !isRunning) byId("question").focus();
  const keys = touch.matches ? "" : isRunning ? "Esc stops" : "Enter sends, Shift + Enter begins a line";
  setText(byId("hint"), keys);
}

function showRoom() {
  const window = facts?.default_generation_settings?.n_ctx;
  const used = chat.usedTokens();
  byId("room").hidden = !window || !used;
  if (!window || !used) return;
  byId("room-meter").value = Math.min(1, used / window);
  setText(byId("room-text"), `${whole(used)} of ${whole(window)} tokens`);
}

// ---- kept: settings and chat over a reload in this tab, chats in this browser ----

const KEPT = `cbatch chat of ${api.base.pathname}`;
let saving = null;

function save() {
  clearTimeout(saving);
  saving = setTimeout(saveNow, 300);
}

function saveNow() {
  const turns = chat.saved();
  kept.keep(turns);
  showChats();
  try {
    sessionStorage.setItem(KEPT, JSON.stringify({ kept: kept.ownChat(), turns, settings: settings.saved() }));
  } catch {
    // too large, or storage is off: the chat is gone at a reload
  }
}

function restore() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    settings.restore(found.settings ?? {});
    chat.restore(found.turns ?? []);
    kept.goOn(found.kept ?? {});
  } catch {
    sessionStorage.removeItem(KEPT);
  }
}

function showChats() {
  byId("chats-open").hidden = !kept.all().length;
}

/** Show a chat that is kept, or begin a new one. */
function openChat({ id, mark, turns = [] } = {}) {
  saveNow(); // what has just come
  chat.clear();
  kept.goOn({ id, mark, n: turns.length });
  chat.restore(turns);
  changed();
  byId("question").focus();
}

/** Begin a new chat in place of one that was deleted. */
function dropChat() {
  clearTimeout(saving);
  kept.goOn();
  chat.clear();
}

// ---- begin ----

function changed() {
  showComposer();
  showRoom();
  showChangedSettings();
  save();
  live.setMine(chat.requestIds());
  if (chat.isRunning()) wake();
}

function showChangedSettings() {
  document.querySelector("[data-view=settings]").classList.toggle("has-changes", settings.isChanged());
}

function refuse(error) {
  if (!isOn("settings")) press("settings");
  settings.showProblem(error);
}

media.setUp();
settings.setUp(() => {
  showChangedSettings();
  save();
});
chat.setUp({
  onchange: changed,
  onproblem: refuse,
  onkey: () => askKey(""),
  onerror: (error) => {
    if (error.status === 0 || error.status === 401 || error.status === 503) wake();
  },
  model: () => byId("model").value || null,
});

byId("model").addEventListener("input", showModel);
byId("composer").addEventListener("submit", submit);
byId("question").addEventListener("input", grow);
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch.matches) return;
  submit(event);
});
byId("stop-button").addEventListener("click", chat.stop);
byId("new-chat").addEventListener("click", () => openChat());
kept.setUp({ onopen: openChat, ondelete: dropChat });
addEventListener("storage", showChats);
byId("key-open").addEventListener("click", () => askKey(""));
byId("key-form").addEventListener("submit", takeKey);
byId("key-close").addEventListener("click", () => byId("key-dialog").close());
for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => press(button.dataset.view));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.isRunning() && !document.querySelector("dialog[open]")) chat.stop();
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : wake()));
addEventListener("online", wake);
addEventListener("pagehide", saveNow);
wide.addEventListener("change", fit);
narrow.addEventListener("change", fit);

fit();
restore();
showChats();
changed();
wake();
if (!touch.matches) byId("question").focus();
