// Pictures that are to go with the next question: dropped, pasted or chosen, and shown small until it is sent.

import { announce, byId, el, iconButton } from "./dom.js";

const N_SIDE = 2048; // larger ones are made smaller: what models see is smaller still

let pending = []; // data URLs
let canSee = false;

/** Return a small picture; it is shown as it is, and read aloud by its name. */
export const shown = (url, i) => el("img", { src: url, alt: `Picture ${i + 1}` });

/** Return the parts of a message that are pictures. */
export const partsOf = (urls) => urls.map((url) => ({ type: "image_url", image_url: { url } }));

/** Return the pictures for a question that is being sent; there are none then. */
export function take() {
  const taken = pending;
  pending = [];
  show();
  return taken;
}

/** Have pictures wait again: the question was not sent. */
export function giveBack(urls) {
  pending = urls;
  show();
}

/** Say whether the model takes pictures. */
export function allow(isAllowed) {
  canSee = isAllowed;
  byId("attach").hidden = !isAllowed;
  if (!isAllowed) take();
}

function show() {
  const box = byId("pictures");
  box.hidden = !pending.length;
  box.replaceChildren(...pending.map((url, i) => el("div", { class: "picture" }, shown(url, i), iconButton("remove", `Remove picture ${i + 1}`, () => drop(i)))));
}

function drop(i) {
  pending = pending.filter((_, at) => at !== i);
  show();
  byId("question").focus();
}

async function add(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!canSee || !images.length) return;
  for (const file of images) {
    try {
      pending.push(await urlOf(file));
    } catch {
      announce(`${file.name} is no picture that this browser can read`);
    }
  }
  show();
  byId("question").focus();
}

/** Return a file's picture as a data URL, no larger than it need be. */
async function urlOf(file) {
  const bitmap = await createImageBitmap(file);
  const share = Math.min(1, N_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * share));
  canvas.height = Math.max(1, Math.round(bitmap.height * share));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return share < 1 ? canvas.toDataURL("image/jpeg", 0.92) : canvas.toDataURL("image/png");
}

export function setUp() {
  const input = byId("attach-file");
  byId("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    add(input.files);
    input.value = "";
  });
  const chat = byId("chat");
  chat.addEventListener("dragover", (event) => {
    if (canSee && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  chat.addEventListener("drop", (event) => {
    if (!canSee || !event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
  byId("question").addEventListener("paste", (event) => {
    if (!canSee || !event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
}
