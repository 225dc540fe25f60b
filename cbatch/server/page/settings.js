// The settings: a form, and what it asks of the server.

import { byId, el } from "./dom.js";
import { MORE_PARAMETERS, PARAMETERS } from "./parameters.js";

const ALL = [...PARAMETERS, ...MORE_PARAMETERS];
const FIELDS = ["system", "vary", "n", "temperatures", "seeds", "stop", "thinking", "tools", "tool-choice", "schema"];
const N_CALLS = 4; // at once: browsers open six connections to a server, and the figures need some

/** A setting that cannot be sent. */
export class SettingError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

const initial = {};

export function setUp(onchange) {
  byId("parameters").append(...PARAMETERS.map(rowOf));
  byId("more-parameters").append(...MORE_PARAMETERS.map(rowOf));
  for (const id of FIELDS) initial[id] = byId(id).value;
  const form = byId("settings-form");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    showVary();
    showProblem(null);
    onchange();
  });
  byId("settings-reset").addEventListener("click", () => {
    restore({});
    onchange();
    byId("system").focus();
  });
  showVary();
}

function rowOf({ name, min, max, step, slider, help }) {
  const input = el("input", { id: name, type: "number", inputmode: "decimal", min, max, step, "aria-describedby": `${name}-help` });
  const range = max >= 1e6 ? `${min} and above` : `${min} … ${max.toLocaleString("en")}`;
  const row = el(
    "div",
    { class: "parameter" },
    el("label", { for: name }, name),
    input,
    el("p", { id: `${name}-help`, class: "help" }, `${range.replace("-", "−")}: ${help}`),
  );
  if (slider) {
    const [low, high, by] = slider;
    const track = el("input", { type: "range", min: low, max: high, step: by, tabindex: "-1", "aria-hidden": "true", id: `${name}-slider` });
    track.addEventListener("input", () => {
      input.value = track.value;
    });
    input.addEventListener("input", () => {
      track.value = input.value || input.placeholder;
    });
    row.append(track);
  }
  input.addEventListener("input", () => row.classList.toggle("is-set", input.value !== ""));
  row.addEventListener("input", () => row.classList.toggle("is-set", input.value !== ""));
  return row;
}

/** Show the server's defaults, and what its template knows. */
export function showDefaults(values, template) {
  for (const { name, unset } of ALL) {
    const input = byId(name);
    const value = values[name];
    input.placeholder = typeof value === "number" ? String(Number(value.toPrecision(6))) : (unset ?? "default");
    const track = byId(`${name}-slider`);
    if (track) track.value = input.value || input.placeholder;
  }
  byId("thinking-row").hidden = !/enable_thinking/.test(template ?? "");
}

function showVary() {
  for (const row of document.querySelectorAll("#settings-form [data-for]")) row.hidden = row.dataset.for !== byId("vary").value;
}

/** Show what is wrong with the settings, or nothing. */
export function showProblem(error) {
  const shown = byId("settings-problem");
  shown.hidden = !error;
  shown.textContent = error ? error.message : "";
  for (const field of document.querySelectorAll("#settings-form [aria-invalid]")) field.removeAttribute("aria-invalid");
  if (!error?.field) return;
  const field = byId(error.field);
  field.setAttribute("aria-invalid", "true");
  const folded = field.closest("details");
  if (folded) folded.open = true;
  field.closest(".field, .row, .parameter").after(shown);
  field.focus();
}

export function saved() {
  const values = {};
  for (const id of [...FIELDS, ...ALL.map(({ name }) => name)]) {
    if (byId(id).value !== (initial[id] ?? "")) values[id] = byId(id).value;
  }
  return values;
}

export function restore(values) {
  for (const id of [...FIELDS, ...ALL.map(({ name }) => name)]) {
    const field = byId(id);
    const value = values[id];
    field.value = typeof value === "string" ? value : (initial[id] ?? "");
    if (!FIELDS.includes(id)) field.dispatchEvent(new Event("input"));
  }
  showVary();
}

/** Whether any setting is not as it was at first. */
export function isChanged() {
  return Object.keys(saved()).length > 0;
}

export function systemPrompt() {
  return byId("system").value.trim();
}

/**
 * Return the calls that the settings ask for: the fields of each, how many answers it has, and the names of these.
 *
 * Throws a `SettingError`.
 */
export function plan() {
  const fields = commonFields();
  const vary = byId("vary").value;
  if (vary === "n") {
    const n = numberIn(byId("n"), "Answers") ?? 1;
    return [{ fields: n > 1 ? { ...fields, n } : fields, labels: Array.from({ length: n }, () => "") }];
  }
  const id = `${vary}s`;
  const { min, max } = PARAMETERS.find(({ name }) => name === vary);
  const values = byId(id).value.split(/[\s,;]+/).filter(Boolean).map(Number);
  const isFine = (value) => Number.isFinite(value) && value >= min && value <= max && (vary !== "seed" || Number.isInteger(value));
  if (!values.length || values.length > N_CALLS || !values.every(isFine)) {
    throw new SettingError(`Give one to ${N_CALLS} ${id}, with commas between them.`, id);
  }
  return values.map((value) => ({ fields: { ...fields, [vary]: value }, labels: [`${vary} ${value}`] }));
}

function commonFields() {
  const fields = {};
  for (const { name } of ALL) {
    const value = numberIn(byId(name), name);
    if (value !== null) fields[name] = value;
  }
  const stop = byId("stop").value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  const thinking = byId("thinking-row").hidden ? "" : byId("thinking").value;
  if (thinking) fields.chat_template_kwargs = { enable_thinking: thinking === "on" };
  const tools = jsonIn("tools", Array.isArray, "The tools must be a list in JSON");
  if (tools?.length) {
    fields.tools = tools;
    if (byId("tool-choice").value) fields.tool_choice = byId("tool-choice").value;
  }
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  const schema = jsonIn("schema", isObject, "The schema must be an object in JSON");
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return fields;
}

function numberIn(input, name) {
  if (input.validity.badInput) throw new SettingError(`${name} must be a number.`, input.id);
  if (!input.value) return null;
  const value = Number(input.value);
  if (!input.validity.valid || !Number.isFinite(value)) {
    const what = input.step === "1" ? "a whole number" : "a number";
    const range = Number(input.max) >= 1e6 ? `from ${input.min} on` : `from ${input.min} to ${input.max}`;
    throw new SettingError(`${name} must be ${what} ${range}.`, input.id);
  }
  return value;
}

function jsonIn(id, isRight, words) {
  const text = byId(id).value.trim();
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new SettingError(`${words}: ${error.message}.`, id);
  }
  if (!isRight(value)) throw new SettingError(`${words}.`, id);
  return value;
}
