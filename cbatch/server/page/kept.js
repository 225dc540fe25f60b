// Chats that outlive their tab: the newest ones, stored in this browser only.

import * as api from "./api.js";
import { byId, el, iconButton, whole } from "./dom.js";

const KEY = `cbatch chats of ${api.base.pathname}`;
const N_KEPT = 20;
const N_CHARACTERS = 2_000_000; // of all: browsers keep five million or so a site

let own = {}; // this tab's chat: its id, the mark of its last keeping, and how many turns it had then

/** Return what is kept, the newest first. */
export function all() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((chat) => typeof chat?.id === "string" && Array.isArray(chat.turns)) : [];
  } catch {
    return [];
  }
}

function write(chats) {
  const parts = chats.slice(0, N_KEPT).map((chat) => JSON.stringify(chat));
  let n = 0;
  const fit = parts.filter((part) => (n += part.length) <= N_CHARACTERS);
  try {
    if (fit.length) localStorage.setItem(KEY, `[${fit.join(",")}]`);
    else localStorage.removeItem(KEY);
  } catch {
    // storage is full or off: chats are gone with their tabs
  }
}

export const ownChat = () => own;

/** Have this tab go on with a chat, or with a new one. */
export function goOn(chat = {}) {
  own = chat;
}

/** Keep this tab's chat: as another one where another tab went on with it; if it was deleted, once it has new turns. */
export function keep(turns) {
  if (!turns.length) return;
  const chats = all();
  const found = chats.find(({ id }) => id === own.id);
  if (own.id && !found && turns.length === own.n) return;
  if (found && JSON.stringify(found.turns) === JSON.stringify(turns)) return;
  const isOwn = own.id && (!found || found.mark === own.mark);
  const mark = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
  const id = isOwn ? own.id : mark;
  own = { id, mark, n: turns.length };
  write([{ id, mark, at: Date.now(), turns }, ...chats.filter((chat) => chat.id !== id)]);
}

export function remove(id) {
  write(all().filter((chat) => chat.id !== id));
}

// ---- the list ----

const TIME = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

function titleOf({ turns }) {
  const first = turns.find((turn) => turn?.role === "user")?.text;
  return typeof first === "string" && first.trim() ? first.trim().slice(0, 200) : "A chat";
}

/** Show the list; `onopen` gets the chat that the user chooses, `ondelete` is called when this tab's chat is deleted. */
export function setUp({ onopen, ondelete }) {
  const dialog = byId("chats-dialog");
  const button = byId("chats-delete");
  const show = () => {
    const chats = all();
    byId("chats-note").textContent = chats.length ? `This browser keeps the newest ${N_KEPT} chats.` : "This browser keeps no chats.";
    byId("kept-chats").replaceChildren(...chats.map((chat) => item(chat)));
    button.hidden = !chats.length;
    setAsked(false);
  };
  const setAsked = (isAsked) => {
    button.dataset.asked = String(isAsked);
    button.textContent = isAsked ? `Delete ${whole(all().length)} permanently?` : "Delete all";
  };
  const item = (chat) => {
    const open = el(
      "button",
      {
        type: "button",
        class: "open-chat",
        "aria-current": String(chat.id === own.id),
        onclick: () => {
          dialog.close();
          onopen(chat);
        },
      },
      el("span", {}, titleOf(chat)),
      el("span", { class: "quiet" }, TIME.format(chat.at)),
    );
    const drop = () => {
      remove(chat.id);
      if (chat.id === own.id) ondelete();
      show();
    };
    return el("li", {}, open, iconButton("remove", `Delete ${titleOf(chat)}`, drop));
  };
  button.addEventListener("click", () => {
    if (button.dataset.asked !== "true") {
      setAsked(true);
      return;
    }
    write([]);
    ondelete();
    show();
  });
  byId("chats-open").addEventListener("click", () => {
    show();
    dialog.showModal();
  });
}
