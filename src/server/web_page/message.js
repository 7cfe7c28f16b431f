// Parts of a message's element: its reasoning, text and tool calls, and forms to edit it and to enter results.

import { el } from "./dom.js";
import { render } from "./markdown.js";

/** Shows reasoning, text and tool calls of a message in its element. */
export function showAnswer(target, message, isGenerating) {
  const body = target.querySelector(".body");
  const part = (name, create) => {
    let found = body.querySelector(`:scope > .${name}`);
    if (!found) {
      found = create();
      body.append(found);
    }
    return found;
  };
  if (message.reasoning) {
    const fold = part("reasoning", () => el("details", { class: "reasoning" }, el("summary", {}, "Reasoning"), el("div", { class: "text" })));
    fold.querySelector("summary").textContent = isGenerating && !message.content ? "Reasoning…" : "Reasoning";
    render(fold.querySelector(".text"), message.reasoning);
  }
  const text = part("text", () => el("div", { class: "text" }));
  if (message.role === "user") text.textContent = message.content;
  else if (message.role === "tool") text.replaceChildren(el("pre", { tabindex: "0" }, message.content));
  else render(text, message.content);
  (message.toolCalls ?? []).forEach((call, number) => {
    const fold = part(`call-${number}`, () => el("details", { class: `call call-${number}` }, el("summary"), el("pre", { tabindex: "0" })));
    fold.querySelector("summary").textContent = `Calls ${call.function.name}`;
    fold.querySelector("pre").textContent = indented(call.function.arguments);
  });
  target.classList.toggle("generating", isGenerating);
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/** Returns a form with the text of a message. `send` is called with the edited text, unless that is blank. */
export function editForm(message, send, cancel) {
  const input = el("textarea", { rows: "4", dir: "auto", "aria-label": "Edited message" });
  input.value = message.content;
  const submit = (event) => {
    event.preventDefault();
    if (input.value.trim()) send(input.value);
  };
  return el(
    "form",
    { class: "composer", submit },
    input,
    el(
      "div",
      { class: "row end" },
      el("button", { type: "button", class: "quiet", click: cancel }, "Cancel"),
      el("button", { type: "submit" }, "Send"),
    ),
  );
}

/** Returns a form for the results of tool calls. `send` is called with one text for each call. */
export function resultsForm(calls, send) {
  const inputs = calls.map((call) => el("textarea", { rows: "2", spellcheck: "false", "aria-label": `Result of ${call.function.name}` }));
  const submit = (event) => {
    event.preventDefault();
    send(inputs.map((input) => input.value));
  };
  const rows = calls.map((call, number) => el("div", {}, el("code", {}, call.function.name), inputs[number]));
  return el("form", { class: "tool-result composer", submit }, ...rows, el("div", { class: "row end" }, el("button", { type: "submit" }, "Send results")));
}
