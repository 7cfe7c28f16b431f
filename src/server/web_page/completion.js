// The playground for completions: a prompt, and each generated token with its probability.

import { answerEvents, request } from "./api.js";
import { announce, el, field } from "./dom.js";
import { defaultSettings, settingsForm, toParameters } from "./settings.js";

/** Alternatives that are asked for with each token. */
const ALTERNATIVES = 5;

/** Tokens beyond which the details of further ones are not shown, so that the page stays fast. */
const TOKENS_MAX = 4000;

/** Builds the playground in `view`. */
export function startCompletion(view, model) {
  const settings = defaultSettings();
  settings.parameters.max_tokens = 64;
  const prompt = el("textarea", { rows: "6", id: "completion-prompt", dir: "auto" });
  const output = el("div", {
    class: "tokens", id: "completion-output", dir: "auto", role: "group", tabindex: "0",
    "aria-label": "Generated tokens. Left and right arrows move between them.",
  });
  const details = el("div", { class: "details", role: "status", "aria-label": "Probabilities" });
  const error = el("p", { class: "error", role: "alert", hidden: true });
  const run = el("button", { type: "submit" }, "Complete");
  const stop = el("button", { type: "button", hidden: true, click: () => abort?.abort() }, "Stop");
  let abort = null;

  const showError = (message) => {
    error.textContent = message ?? "";
    error.hidden = !message;
  };
  const select = (token) => {
    output.querySelector(".selected")?.classList.remove("selected");
    if (!token) return;
    token.classList.add("selected");
    details.replaceChildren(probabilities(token.alternatives));
  };
  output.addEventListener("mouseover", (event) => event.target.alternatives && select(event.target));
  output.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    const selected = output.querySelector(".selected");
    select(selected ? (selected[step] ?? selected) : output.firstElementChild);
  });

  const complete = async (event) => {
    event.preventDefault();
    if (abort) return;
    showError(null);
    let parameters;
    try {
      parameters = toParameters(settings);
    } catch (reason) {
      return showError(reason.message);
    }
    abort = new AbortController();
    [run.hidden, stop.hidden] = [true, false];
    output.replaceChildren();
    details.replaceChildren();
    try {
      const body = { ...parameters, prompt: prompt.value, logprobs: ALTERNATIVES, stream: true };
      for await (const chunk of answerEvents("v1/completions", { body, signal: abort.signal })) append(output, chunk);
      announce("Completion ended");
    } catch (reason) {
      if (!abort.signal.aborted) showError(reason.message);
    }
    abort = null;
    [run.hidden, stop.hidden] = [false, true];
  };

  const count = el("small");
  const countTokens = async () => {
    try {
      const response = await request("tokenize", { body: { prompt: prompt.value } });
      count.textContent = `${(await response.json()).count} tokens`;
    } catch (reason) {
      showError(reason.message);
    }
  };
  const context = `${model.id} has a context of ${model.context} tokens.`;
  view.replaceChildren(
    el(
      "form",
      { class: "thread", submit: complete },
      field("Prompt", prompt, context),
      el("div", { class: "row end" }, count, el("button", { type: "button", class: "quiet", click: countTokens }, "Count tokens"), stop, run),
      error,
      el("h2", {}, "Completion"),
      output,
      details,
    ),
    el("div", { class: "sidebar" }, el("h2", {}, "Parameters"), settingsForm(settings, { isChat: false }, () => {})),
  );
  view.addEventListener("keydown", (event) => event.key === "Escape" && abort?.abort());
}

/** Appends the tokens of a chunk. */
function append(output, { choices }) {
  for (const { text, logprobs } of choices ?? []) {
    const tokens = logprobs?.tokens ?? [];
    if (tokens.length === 0 || output.childElementCount + tokens.length > TOKENS_MAX) {
      output.append(text);
    } else if (tokens.join("") === text) {
      output.append(...tokens.map((token, at) => tokenElement(token, logprobs, at)));
    } else if (text) {
      // A character of several tokens, each of which alone is no text.
      output.append(tokenElement(text, logprobs, tokens.length - 1));
    }
  }
}

/** Returns the element of a token, or of the text of several, with the probabilities at `at`. */
function tokenElement(text, logprobs, at) {
  const span = el("span", { class: "token" }, text);
  const logprob = logprobs.token_logprobs[at];
  if (logprob !== null) {
    span.style.setProperty("--doubt", (1 - Math.exp(logprob)).toFixed(3));
    span.alternatives = { token: logprobs.tokens[at], logprob, top: logprobs.top_logprobs?.[at] ?? {} };
  }
  return span;
}

function probabilities({ token, logprob, top }) {
  const rows = Object.entries(top).filter(([other]) => other !== token);
  rows.push([token, logprob]);
  rows.sort((a, b) => b[1] - a[1]);
  const row = ([text, value]) => {
    const p = Math.exp(value);
    const meter = el("meter", { min: "0", max: "1", value: p.toFixed(4), "aria-label": "Probability" });
    return el(
      "tr",
      { class: text === token ? "chosen" : null },
      el("th", { scope: "row" }, el("code", {}, visible(text))),
      el("td", {}, meter),
      el("td", {}, `${(100 * p).toFixed(2)} %`),
    );
  };
  return el("table", {}, el("tbody", {}, ...rows.map(row)));
}

/** Shows white space. */
function visible(text) {
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣") || "(empty)";
}
