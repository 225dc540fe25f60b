// Pictures and sounds that are to go with the next question: dropped, pasted or chosen, and shown until it is sent.

import { announce, byId, el, iconButton, setText } from "./dom.js";

const N_SIDE = 2048; // larger ones are made smaller: what models see is smaller still

let pending = []; // data URLs
let taken = { picture: false, sound: false }; // what the model takes

const kindOf = ({ type }) => (type.startsWith("image/") ? "picture" : type.startsWith("audio/") ? "sound" : "");
const isSound = (url) => url.startsWith("data:audio/");
const nameOf = (url, i) => `${isSound(url) ? "Sound" : "Picture"} ${i + 1}`;

/** Return a small picture, or a player; it is read aloud by its name. */
export function shown(url, i) {
  if (isSound(url)) return el("audio", { src: url, controls: "", "aria-label": nameOf(url, i) });
  return el("img", { src: url, alt: nameOf(url, i) });
}

/** Return the parts of a message that are pictures and sounds. */
export const partsOf = (urls) => urls.map((url) => (isSound(url) ? { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1) } } : { type: "image_url", image_url: { url } }));

/** Return the pictures and sounds for a question that is being sent; there are none then. */
export function take() {
  const urls = pending;
  pending = [];
  show();
  return urls;
}

/** Have them wait again: the question was not sent. */
export function giveBack(urls) {
  pending = urls;
  show();
}

/** Say whether the model takes pictures, and sounds. */
export function allow({ vision, audio } = {}) {
  taken = { picture: Boolean(vision), sound: Boolean(audio) };
  const words = [taken.picture && "pictures", taken.sound && "sound"].filter(Boolean);
  byId("attach").hidden = !words.length;
  setText(byId("attach"), `Add ${words.join(" or ")}`);
  byId("attach-file").accept = [taken.picture && "image/*", taken.sound && "audio/*"].filter(Boolean).join();
  pending = pending.filter((url) => taken[isSound(url) ? "sound" : "picture"]);
  show();
}

function show() {
  const box = byId("media");
  box.hidden = !pending.length;
  box.replaceChildren(...pending.map((url, i) => el("div", { class: "medium" }, shown(url, i), iconButton("remove", `Remove ${nameOf(url, i).toLowerCase()}`, () => drop(i)))));
}

function drop(i) {
  pending = pending.filter((_, at) => at !== i);
  show();
  byId("question").focus();
}

async function add(files) {
  const media = [...files].filter((file) => taken[kindOf(file)]);
  if (!media.length) return;
  for (const file of media) {
    try {
      pending.push(await (kindOf(file) === "sound" ? wholeOf(file) : urlOf(file)));
    } catch {
      announce(`${file.name} is no ${kindOf(file)} that this browser can read`);
    }
  }
  show();
  byId("question").focus();
}

/** Return a file as a data URL. */
function wholeOf(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => fail(reader.error));
    reader.readAsDataURL(file);
  });
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

const takesAny = () => taken.picture || taken.sound;

export function setUp() {
  const input = byId("attach-file");
  byId("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    add(input.files);
    input.value = "";
  });
  const chat = byId("chat");
  chat.addEventListener("dragover", (event) => {
    if (takesAny() && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  chat.addEventListener("drop", (event) => {
    if (!takesAny() || !event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
  byId("question").addEventListener("paste", (event) => {
    if (!takesAny() || !event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
}
