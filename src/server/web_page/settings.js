// The parameters of requests, as a form.

import { el, field } from "./dom.js";

/** Numeric parameters: name, label, range and step. Empty ones are left to the server. */
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["top_k", "Top k", 0, 1000, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty", 0.5, 2, 0.05],
  ["max_tokens", "Maximum tokens", 1, 1000000, 1],
  ["seed", "Seed", 0, 4294967295, 1],
];

/** Returns the settings of a new conversation or completion. */
export function defaultSettings() {
  return { system: "", parameters: {}, stop: "", tools: "", extra: "" };
}

/** Completes settings that come from elsewhere. */
export function withDefaults(settings) {
  const all = { ...defaultSettings(), ...settings };
  for (const name of ["system", "stop", "tools", "extra"]) if (typeof all[name] !== "string") all[name] = "";
  if (typeof all.parameters !== "object" || all.parameters === null) all.parameters = {};
  return all;
}

/** Returns the fields of a request body. Throws an error that names the setting if one is not valid JSON. */
export function toParameters(settings) {
  const body = { ...settings.parameters };
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length > 0) body.stop = stop;
  const tools = parseJson(settings.tools, "Tools");
  if (tools !== null) body.tools = tools;
  const extra = parseJson(settings.extra, "Other parameters");
  if (extra !== null && (typeof extra !== "object" || Array.isArray(extra))) {
    throw new Error("Other parameters: this must be a JSON object.");
  }
  if (extra?.n > 1) throw new Error("Other parameters: n is 1 here; Regenerate makes other versions.");
  return { ...body, ...extra };
}

function parseJson(text, name) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: this is not valid JSON. ${error.message}`);
  }
}

/**
 * Returns a form for `settings`, which it changes. `changed` is called after each change.
 * @param {{isChat: boolean}} options
 */
export function settingsForm(settings, { isChat }, changed) {
  const text = (name, label, rows, hint) => {
    const input = el("textarea", { rows, dir: "auto", spellcheck: name === "system" ? "true" : "false" });
    input.value = settings[name];
    input.addEventListener("input", () => {
      settings[name] = input.value;
      changed();
    });
    return field(label, input, hint);
  };
  const number = ([name, label, min, max, step]) => {
    const input = el("input", { type: "number", min, max, step, placeholder: "default" });
    input.value = settings.parameters[name] ?? "";
    input.addEventListener("input", () => {
      if (input.value === "" || !Number.isFinite(input.valueAsNumber)) delete settings.parameters[name];
      else settings.parameters[name] = input.valueAsNumber;
      changed();
    });
    return field(label, input);
  };
  return el(
    "form",
    { class: "settings", submit: (event) => event.preventDefault() },
    isChat && text("system", "System prompt", 4),
    el("div", { class: "numbers" }, ...NUMBERS.map(number)),
    text("stop", "Stop strings", 2, "One per line."),
    isChat && text("tools", "Tools", 4, "A JSON list of functions, as in OpenAI's API. You enter their results."),
    text("extra", "Other parameters", 3, "A JSON object of any parameters of the API."),
  );
}
