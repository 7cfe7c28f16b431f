// The page: its views, the color theme, and the API key of the tab.

import { apiKey, onKeyNeeded, request, setApiKey } from "./api.js";
import { startChat } from "./chat.js";
import { startCompletion } from "./completion.js";
import { el } from "./dom.js";
import { InFlight } from "./inflight.js";
import { kept } from "./storage.js";

const THEMES = ["auto", "light", "dark"];

const views = Object.fromEntries(
  ["chat", "completion", "inflight"].map((name) => [name, document.getElementById(`view-${name}`)]),
);

/** Asks for an API key. Resolves to whether one was given. */
let asking = null;
function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key-input");
    document.getElementById("key-reason").textContent = `${reason} The key is kept in this tab until you close it.`;
    input.value = "";
    dialog.returnValue = "cancel";
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const isGiven = dialog.returnValue === "ok";
        if (isGiven) setApiKey(input.value.trim());
        input.value = "";
        showKeyButton();
        resolve(isGiven);
      },
      { once: true },
    );
    dialog.showModal();
    input.focus();
  });
  return asking;
}

function showKeyButton() {
  document.getElementById("key-button").hidden = apiKey() === "";
}

function setUpKey() {
  const dialog = document.getElementById("key-dialog");
  document.getElementById("key-cancel").addEventListener("click", () => dialog.close("cancel"));
  document.getElementById("key-button").addEventListener("click", () => askForKey("Replace the API key of this tab."));
  onKeyNeeded(askForKey);
  showKeyButton();
}

function setUpTheme() {
  const button = document.getElementById("theme");
  const choice = kept("localStorage", "theme");
  let theme = THEMES.includes(choice.get()) ? choice.get() : "auto";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = theme[0].toUpperCase() + theme.slice(1);
    button.setAttribute("aria-label", `Color theme: ${theme}`);
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    choice.set(theme);
    show();
  });
  show();
}

function showProblem(message, retry) {
  const target = document.getElementById("no-view");
  target.hidden = !message;
  target.replaceChildren(message ?? "");
  if (retry) target.append(" ", el("button", { type: "button", click: retry }, "Try again"));
}

async function start() {
  showProblem(null);
  let model;
  try {
    [model] = (await (await request("v1/models")).json()).data;
  } catch (error) {
    showProblem(error.message, start);
    return;
  }
  document.getElementById("model-name").textContent = model.id;
  const offered = {
    chat: model.endpoints.includes("/v1/chat/completions"),
    completion: model.endpoints.includes("/v1/completions"),
    inflight: true,
  };
  const started = new Set();
  const inFlight = new InFlight(views.inflight);
  const starters = {
    chat: () => startChat(views.chat, model),
    completion: () => startCompletion(views.completion, model),
    inflight: () => {},
  };
  for (const link of document.querySelectorAll("nav a[data-view]")) link.hidden = !offered[link.dataset.view];
  const first = Object.keys(offered).find((name) => offered[name]);
  const show = () => {
    const wanted = location.hash.slice(1);
    const name = offered[wanted] ? wanted : first;
    for (const [other, view] of Object.entries(views)) view.hidden = other !== name;
    for (const link of document.querySelectorAll("nav a[data-view]")) {
      if (link.dataset.view === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (!started.has(name)) {
      started.add(name);
      Promise.resolve(starters[name]()).catch((error) => showProblem(`The view cannot be shown: ${error.message}`));
    }
    // A page that nobody sees leaves the connection to others.
    if (name === "inflight" && !document.hidden) inFlight.start();
    else inFlight.stop();
  };
  addEventListener("hashchange", show);
  document.addEventListener("visibilitychange", show);
  show();
}

setUpTheme();
setUpKey();
start();
