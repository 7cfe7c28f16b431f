// The chat: conversations, their messages, and answers as they are generated.

import { answerEvents } from "./api.js";
import {
  ROOT, addMessage, branch, fromImport, isEmpty, newConversation, pathTo, placeOf, removeMessage, selectSibling, toApi,
  toMarkdown,
} from "./conversation.js";
import { announce, copy, download, el } from "./dom.js";
import { editForm, resultsForm, showAnswer } from "./message.js";
import { defaultSettings, settingsForm, toParameters, withDefaults } from "./settings.js";
import { openStore } from "./store.js";

const TITLE_CHARS = 60;

/** Milliseconds after a change until it is kept, and between two copies of an answer that grows. */
const SAVE_MS = 500;
const SAVE_ANSWER_MS = 3000;

/** Builds the chat in `view`. */
export async function startChat(view, model) {
  let chat = null;
  const store = await openStore((id) => chat?.refresh(id));
  const all = (await store.all()).sort((a, b) => b.updated - a.updated);
  all.forEach((conversation) => (conversation.settings = withDefaults(conversation.settings)));
  chat = new Chat(view, model, store, all);
}

class Chat {
  constructor(view, model, store, conversations) {
    Object.assign(this, { model, store, conversations, abort: null, generating: null });
    // What was shown of each message, by its element.
    this.states = new WeakMap();
    this.list = el("ul", { class: "conversations" });
    this.log = el("div", { class: "log", role: "log", "aria-label": "Messages", tabindex: "0" });
    this.settings = el("div");
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.input = el("textarea", { id: "prompt", rows: "3", dir: "auto", placeholder: "Message", "aria-label": "Message" });
    this.send = el("button", { type: "submit", id: "send" }, "Send");
    this.stop = el("button", { type: "button", id: "stop", hidden: true, click: () => this.abort?.abort() }, "Stop");
    this.input.addEventListener("keydown", (event) => this.onKey(event));
    view.addEventListener("keydown", (event) => event.key === "Escape" && !isComposing(event) && this.abort?.abort());
    addEventListener("pagehide", () => this.keep((conversation) => this.store.putLast(conversation, () => this.generating)));
    view.replaceChildren(this.sidebar(), this.main());
    this.open(conversations[0] ?? this.create());
  }

  sidebar() {
    const importer = el("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "Import" });
    importer.addEventListener("change", () => this.import(importer));
    const notice = this.store.isKept ? null : el("p", { class: "notice" }, "This browser keeps conversations only until you close the page.");
    return el(
      "details",
      { class: "sidebar", open: matchMedia("(min-width: 60rem)").matches },
      el("summary", {}, "Conversations"),
      el(
        "div",
        { class: "row" },
        el("button", { type: "button", id: "new-chat", click: () => this.open(this.create(), true) }, "New chat"),
        el("button", { type: "button", class: "quiet", click: () => importer.click() }, "Import"),
      ),
      importer,
      notice,
      el("nav", { "aria-label": "Conversations" }, this.list),
    );
  }

  main() {
    const submit = (event) => {
      event.preventDefault();
      this.submit();
    };
    return el(
      "div",
      { class: "thread" },
      el("details", { class: "panel" }, el("summary", {}, "System prompt and parameters"), this.settings),
      el("h2", { class: "visually-hidden" }, "Messages"),
      this.log,
      this.error,
      el("form", { class: "composer", submit }, this.input, el("div", { class: "row end" }, this.stop, this.send)),
    );
  }

  create() {
    const before = this.conversation?.settings;
    const settings = before ? { ...structuredClone(before), system: before.system } : defaultSettings();
    return newConversation(settings);
  }

  open(conversation, focus = false) {
    if (conversation === this.conversation) return;
    this.abort?.abort();
    this.keep();
    this.conversation = conversation;
    this.showSettings();
    this.showError(null);
    this.showAll();
    this.showList();
    if (focus) this.input.focus();
  }

  showSettings() {
    const { conversation } = this;
    const changed = () => branch(conversation).length > 0 && this.keepSoon(SAVE_MS);
    this.shownSettings = conversation.settings;
    this.settings.replaceChildren(settingsForm(conversation.settings, { isChat: true }, changed));
  }

  /** Keeps the open conversation, and shows it first in the list. */
  save() {
    const { conversation } = this;
    const first = branch(conversation)[0];
    conversation.title ||= (first?.content ?? "").trim().split("\n")[0].slice(0, TITLE_CHARS);
    this.conversations = [conversation, ...this.conversations.filter((other) => other.id !== conversation.id)];
    this.keepSoon(0);
    this.keep();
    this.showList();
  }

  /** Keeps the open conversation once `ms` milliseconds have passed. */
  keepSoon(ms) {
    this.unkept ??= { conversation: this.conversation, timer: setTimeout(() => this.keep(), ms) };
  }

  /** Keeps what has changed. */
  keep(put = (conversation) => this.put(conversation)) {
    if (!this.unkept) return;
    const { conversation, timer } = this.unkept;
    this.unkept = null;
    clearTimeout(timer);
    put(conversation);
  }

  /** Keeps a conversation, unless it was deleted. */
  put(conversation) {
    if (!this.conversations.includes(conversation)) return;
    conversation.updated = Date.now();
    this.merge(conversation, () => this.store.put(conversation, () => this.generating));
  }

  /** Shows what another tab has done with a conversation. */
  async refresh(id) {
    const known = this.conversations.find((other) => other.id === id);
    if (known) return this.merge(known, () => this.store.refresh(known));
    const added = await this.store.get(id);
    if (!added || this.conversations.some((other) => other.id === id)) return;
    added.settings = withDefaults(added.settings);
    this.conversations.unshift(added);
    this.showList();
  }

  /** Shows what `exchange` changes in a conversation. It resolves to false if another tab has deleted the conversation. */
  async merge(conversation, exchange) {
    const { title } = conversation;
    try {
      if (!(await exchange())) {
        const isOpen = conversation === this.conversation;
        this.forget(conversation);
        if (isOpen) this.showError(`"${conversation.title}" was deleted in another tab.`);
        return;
      }
    } catch (error) {
      this.showError(`The browser cannot keep the conversation: ${error}`);
      return;
    }
    if (conversation.title !== title) this.showList();
    if (conversation === this.conversation) this.showChanges();
  }

  showList() {
    const entry = (conversation) => {
      const title = conversation.title || "New chat";
      const isOpen = conversation.id === this.conversation.id;
      const action = (label, run) =>
        el("button", { type: "button", class: "quiet", "aria-label": `${label}: ${title}`, click: run }, label);
      const name = `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}`;
      return el(
        "li",
        { class: isOpen ? "open" : null },
        el("button", { type: "button", class: "title", dir: "auto", "aria-current": isOpen ? "true" : null, click: () => this.open(conversation) }, title),
        isOpen &&
          el(
            "div",
            { class: "row" },
            action("Rename", () => this.rename(conversation)),
            action("JSON", () => download(`${name}.json`, "application/json", JSON.stringify(conversation, null, 1))),
            action("Markdown", () => download(`${name}.md`, "text/markdown", toMarkdown(conversation))),
            action("Delete", () => this.remove(conversation)),
          ),
      );
    };
    const shown = this.conversations.includes(this.conversation)
      ? this.conversations
      : [this.conversation, ...this.conversations];
    this.list.replaceChildren(...shown.map(entry));
  }

  rename(conversation) {
    const title = prompt("Title", conversation.title);
    if (title === null) return;
    conversation.title = title.trim().slice(0, 200);
    this.save();
    this.list.querySelector(".open .title").focus();
  }

  remove(conversation) {
    if (!confirm(`Delete "${conversation.title || "New chat"}"?`)) return;
    this.store.remove(conversation.id).catch((error) => this.showError(String(error)));
    this.forget(conversation);
    this.input.focus();
  }

  /** Shows a conversation no longer. */
  forget(conversation) {
    this.conversations = this.conversations.filter((other) => other !== conversation);
    if (this.unkept?.conversation === conversation) this.unkept = null;
    if (conversation === this.conversation) this.open(this.conversations[0] ?? this.create());
    else this.showList();
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    try {
      const imported = fromImport(JSON.parse(await file.text()));
      if (!imported) throw new Error("it is not a conversation of this page");
      imported.settings = withDefaults(imported.settings);
      this.open(imported);
      // Kept once it was shown.
      this.save();
    } catch (error) {
      this.showError(`${file.name} cannot be imported: ${error.message}`);
    }
  }

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
    event.preventDefault();
    this.submit();
  }

  showError(message) {
    this.error.textContent = message ?? "";
    this.error.hidden = !message;
  }

  /** Sends the text in the input as the next message. */
  submit() {
    const content = this.input.value;
    if (this.generating || !content.trim()) return;
    const last = branch(this.conversation).at(-1);
    if (last?.toolCalls?.length) {
      this.showError("Enter the results of the tool calls first.");
      return;
    }
    // A message without an answer gets another version, since chats alternate.
    const parent = last?.role === "user" ? last.parent : (last?.id ?? ROOT);
    const asked = addMessage(this.conversation, parent, { role: "user", content });
    this.input.value = "";
    this.save();
    this.generate(asked.id);
  }

  /** Generates an answer to a message, beside those that it has. */
  async generate(asked) {
    const { conversation } = this;
    let parameters;
    try {
      parameters = toParameters(conversation.settings);
    } catch (error) {
      this.showAll();
      this.showError(error.message);
      return;
    }
    const messages = toApi(pathTo(conversation, asked), conversation.settings.system);
    const answer = addMessage(conversation, asked, { role: "assistant" });
    const abort = (this.abort = new AbortController());
    this.generating = answer;
    this.showError(null);
    this.showBusy();
    this.showAll();
    let began = null;
    try {
      const body = { ...parameters, messages, stream: true, stream_options: { include_usage: true } };
      for await (const chunk of answerEvents("v1/chat/completions", { body, signal: abort.signal })) {
        began ??= performance.now();
        this.receive(answer, chunk, performance.now() - began);
        if (this.conversation === conversation) this.keepSoon(SAVE_ANSWER_MS);
      }
    } catch (error) {
      answer.note = abort.signal.aborted ? "stopped" : error.message;
      if (!abort.signal.aborted && this.conversation === conversation) this.showError(error.message);
    }
    this.finish(conversation, answer);
  }

  finish(conversation, answer) {
    const hasFailed = isEmpty(answer) && answer.note;
    if (hasFailed) removeMessage(conversation, answer.id);
    if (this.generating === answer) {
      this.generating = null;
      this.abort = null;
    }
    const hadFocus = document.activeElement === this.stop;
    if (this.conversation !== conversation) {
      this.showBusy();
      return this.put(conversation);
    }
    this.save();
    // The elements of the other messages stay, so that screen readers read none of them again.
    const follows = this.isAtEnd();
    const shown = this.elementOf(answer.id);
    if (hasFailed) this.showAll();
    else shown?.replaceWith(this.messageElement(answer));
    this.showBusy();
    if (follows) this.scrollToEnd();
    announce(answer.note ? `Answer ended: ${answer.note}` : "Answer complete");
    const input = this.log.querySelector(".tool-result textarea");
    if (input) input.focus();
    else if (hadFocus) this.input.focus();
  }

  /** Adds a chunk of a stream to an answer. */
  receive(answer, { choices, usage }, elapsed) {
    const choice = choices?.[0];
    const delta = choice?.delta ?? {};
    if (delta.content) answer.content += delta.content;
    if (delta.reasoning_content) answer.reasoning = (answer.reasoning ?? "") + delta.reasoning_content;
    for (const part of delta.tool_calls ?? []) {
      answer.toolCalls ??= [];
      const call = (answer.toolCalls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      if (part.id) call.id = part.id;
      if (part.function?.name) call.function.name += part.function.name;
      if (part.function?.arguments) call.function.arguments += part.function.arguments;
    }
    if (choice?.finish_reason === "length") answer.note = "cut at the maximum length";
    if (usage) answer.speed = { tokens: usage.completion_tokens, prompt: usage.prompt_tokens, seconds: Math.max(elapsed, 1) / 1000 };
    this.showSoon();
  }

  showBusy() {
    this.send.hidden = Boolean(this.generating);
    this.stop.hidden = !this.generating;
    this.log.setAttribute("aria-busy", this.generating ? "true" : "false");
    for (const button of this.log.querySelectorAll("button[data-idle]")) button.disabled = Boolean(this.generating);
  }

  /** Shows the answer that is being generated with the next frame. */
  showSoon() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => {
      this.isScheduled = false;
      const shown = this.generating && this.elementOf(this.generating.id);
      if (!shown) return;
      const follows = this.isAtEnd();
      showAnswer(shown, this.generating, true);
      if (follows) this.scrollToEnd();
    });
  }

  elementOf(id) {
    return this.log.querySelector(`[data-message="${CSS.escape(id)}"]`);
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  showAll() {
    const messages = branch(this.conversation);
    const empty = el("p", { class: "hint" }, `Ask ${this.model.id} something. Enter sends, Shift+Enter begins a new line, Escape stops.`);
    this.log.replaceChildren(...(messages.length > 0 ? messages.map((message) => this.messageElement(message)) : [empty]));
    this.scrollToEnd();
  }

  /** Shows what has changed in the open conversation, and leaves all other elements as they are. */
  showChanges() {
    if (this.shownSettings !== this.conversation.settings) this.showSettings();
    const follows = this.isAtEnd();
    branch(this.conversation).forEach((message, place) => {
      const shown = this.log.children[place];
      const isShown = shown?.dataset.message === message.id;
      // A text that is being written, or an answer that is, shows itself.
      const isWritten = (input) => input === document.activeElement || input.value !== input.defaultValue;
      const isBusy = isShown && [...shown.querySelectorAll("textarea")].some(isWritten);
      if (isShown && (message === this.generating || isBusy)) return;
      if (isShown && this.states.get(shown) === this.stateOf(message)) return;
      if (shown) shown.replaceWith(this.messageElement(message));
      else this.log.append(this.messageElement(message));
    });
    if (follows) this.scrollToEnd();
  }

  /** Returns what the element of a message depends on. */
  stateOf(message) {
    const { children, selected, ...fields } = message;
    return JSON.stringify([fields, placeOf(this.conversation, message.id), children.length > 0, message === this.generating]);
  }

  messageElement(message) {
    const names = { user: "You", assistant: this.model.id, tool: "Tool result" };
    const body = el("div", { class: "body", dir: "auto" });
    const target = el(
      "article",
      { class: `message ${message.role}`, "data-message": message.id, "aria-label": names[message.role] },
      el("header", {}, names[message.role]),
      body,
    );
    showAnswer(target, message, message === this.generating);
    if (message !== this.generating) target.append(this.actions(message, target));
    if (message.toolCalls?.length && message.children.length === 0 && message !== this.generating) {
      target.append(resultsForm(message.toolCalls, (results) => this.addResults(message, results)));
    }
    this.states.set(target, this.stateOf(message));
    return target;
  }

  actions(message, target) {
    const { index, count } = placeOf(this.conversation, message.id);
    const action = (label, run, hint) =>
      el("button", { type: "button", class: "quiet", "aria-label": hint, click: (event) => run(event.currentTarget) }, label);
    // A button that waits until nothing is generated.
    const idle = (label, run, hint) => {
      const button = action(label, () => !this.generating && run(), hint);
      button.dataset.idle = "";
      button.disabled = Boolean(this.generating);
      return button;
    };
    const turn = (step, hint) => () => {
      selectSibling(this.conversation, message.id, step);
      const { children, selected } = this.conversation.messages[message.parent];
      this.save();
      this.showAll();
      this.elementOf(children[selected])?.querySelector(`[aria-label="${hint}"]`)?.focus();
    };
    const others =
      count > 1 &&
      el(
        "span",
        { class: "branches" },
        idle("‹", turn(-1, "Previous version"), "Previous version"),
        el("span", { "aria-label": `Version ${index + 1} of ${count}` }, `${index + 1}/${count}`),
        idle("›", turn(1, "Next version"), "Next version"),
      );
    const { speed, note } = message;
    const details = [
      note,
      speed && `${speed.tokens} tokens in ${speed.seconds.toFixed(1)} s (${(speed.tokens / speed.seconds).toFixed(1)} tokens/s), prompt ${speed.prompt}`,
    ].filter(Boolean);
    return el(
      "footer",
      {},
      others,
      action("Copy", (button) => copy(message.content, button)),
      message.role === "user" && idle("Edit", () => this.edit(message, target)),
      message.role !== "assistant" && message.children.length === 0 && idle("Answer", () => this.generate(message.id)),
      message.role === "assistant" && idle("Regenerate", () => this.generate(message.parent)),
      details.length > 0 && el("small", {}, details.join(" · ")),
    );
  }

  /** Replaces the message by a form. Its text becomes a new version of the message. */
  edit(message, target) {
    const send = (content) => {
      if (this.generating) return;
      const edited = addMessage(this.conversation, message.parent, { role: "user", content });
      this.save();
      this.generate(edited.id);
    };
    target.replaceChildren(editForm(message, send, () => this.cancelEdit(message)));
    target.querySelector("textarea").focus();
  }

  cancelEdit(message) {
    this.showAll();
    this.elementOf(message.id)?.querySelector("button")?.focus();
  }

  /** Adds the results of an answer's tool calls, and generates an answer to them. */
  addResults(message, results) {
    if (this.generating) return;
    let parent = message.id;
    results.forEach((content, number) => {
      parent = addMessage(this.conversation, parent, { role: "tool", content, toolCallId: message.toolCalls[number].id }).id;
    });
    this.save();
    this.generate(parent);
  }
}

/** Whether a key belongs to text that is being composed. (Safari ends it with a key 229 of its own.) */
function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}
