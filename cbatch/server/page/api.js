// The server: where it is, with which key, and its errors in words.

import { whole } from "./dom.js";

/** The address of the server, also below a prefix: this file is in its folder `page`. */
export const base = new URL("..", import.meta.url);

const KEY = `cbatch key of ${base.pathname}`;

let known = null; // the key where the browser stores none

export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? known ?? "";
  } catch {
    return known ?? "";
  }
}

export function setKey(value) {
  known = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // storage is off: the key is gone at a reload
  }
}

/** An answer that is an error, or none at all: then `status` is 0. */
export class ApiError extends Error {
  constructor(status, message, { code = null, more = {}, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, more, retryAfter });
  }
}

/** Return the response of a call, or throw an `ApiError`. A signal that ends it throws as `fetch` does. */
export async function open(path, { body, signal, key: given = key(), isPoll = false } = {}) {
  const headers = {};
  if (isPoll) headers["x-cbatch-poll"] = "1"; // neither logged nor counted
  if (given) headers["x-api-key"] = given; // a proxy may have `authorization` for itself
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    const init = { method, headers, body: body && JSON.stringify(body), signal };
    response = await fetch(new URL(path, base), { ...init, cache: "no-store", credentials: "same-origin", redirect: "error" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "no connection");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

export async function json(path, more) {
  return (await open(path, more)).json();
}

async function problemOf(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's page, say
  }
  const message = typeof error.message === "string" ? error.message : response.statusText;
  return new ApiError(response.status, message, { code: error.code, more: error, retryAfter });
}

/**
 * Yield the values of a stream of events; null for a comment.
 *
 * Throws an `ApiError` where the server sends one, and where the stream breaks off.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error?.name === "AbortError") throw error;
        throw new ApiError(0, "the stream broke off", { code: "cut" });
      }
      if (part.done) throw new ApiError(0, "the stream broke off", { code: "cut" });
      const frames = (rest + part.value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        if (!frame.startsWith("data: ")) {
          yield null;
          continue;
        }
        const data = frame.slice(6);
        if (data === "[DONE]") return;
        const value = JSON.parse(data);
        if (value.error) throw new ApiError(500, String(value.error.message), { code: value.error.code, more: value.error });
        yield value;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const WORDS = {
  cut: ["The answer was cut", "The connection broke before the end of it."],
  0: ["The server does not answer", "It may be stopped, or the network is gone. The page goes on trying."],
  401: ["The server wants a valid key", ""],
  404: ["The server does not know this", ""],
  408: ["The message did not arrive in time", "The connection to the server is slow."],
  413: ["The chat is too large", "Start a new one, or take something out of it."],
  429: ["The queue is full", "Other requests wait already. Try again in a moment."],
  502: ["The server does not answer", "Something between this page and the server says so."],
  503: ["The server takes no requests now", ""],
  504: ["The time is over", "No slot became free within the time that was given."],
  shutting_down: ["The server is shutting down", "It takes no new requests. The page shows when it is back."],
  worker_died: ["The engine's process ended", "A new one is started. Asking again may work."],
};

/** Return an error as a title and a text. */
export function inWords(error) {
  if (!(error instanceof ApiError)) return { title: "The page itself has failed", text: String(error?.message ?? error) };
  const { n_prompt_tokens: nPrompt, n_ctx: nCtx } = error.more;
  if (error.code === "context_length_exceeded" && nPrompt && nCtx) {
    const text = `It has ${whole(nPrompt)} tokens, and the window has ${whole(nCtx)}. Start a new chat, or shorten it by editing an earlier message.`;
    return { title: "The chat is too long", text };
  }
  const [title, text] = WORDS[error.code] ?? WORDS[error.status] ?? [];
  if (!title) {
    const refused = error.status < 500;
    return { title: refused ? "The server refuses this request" : "The server could not answer", text: error.message };
  }
  const saidBetter = text || error.message;
  return { title, text: error.status === 429 && error.message ? sentence(error.message) : saidBetter };
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
