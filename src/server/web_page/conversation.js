// A conversation is a tree of messages: an edited message and a regenerated answer are siblings of the old ones. The
// shown branch follows from the child that is selected at each message.

/** @typedef {{id: string, parent: string, role: string, content: string, reasoning?: string, toolCalls?: object[],
 *   toolCallId?: string, note?: string, children: string[], selected: number}} Message */

/** Id of the root, which is no message. */
export const ROOT = "root";

/** Returns a random id. (`crypto.randomUUID` is missing on pages that were loaded without TLS.) */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Creates an empty conversation with these settings. */
export function newConversation(settings) {
  const now = Date.now();
  const root = { id: ROOT, parent: null, role: "root", content: "", children: [], selected: 0 };
  return { id: newId(), title: "", created: now, updated: now, settings, messages: { [ROOT]: root } };
}

/** Adds a message below `parent`, and selects it. */
export function addMessage(conversation, parent, fields) {
  const message = { id: newId(), parent, content: "", children: [], selected: 0, ...fields };
  const above = conversation.messages[parent];
  conversation.messages[message.id] = message;
  above.children.push(message.id);
  above.selected = above.children.length - 1;
  return message;
}

/** Removes a message and all below it, and selects the sibling before it. */
export function removeMessage(conversation, id) {
  const message = conversation.messages[id];
  const above = conversation.messages[message.parent];
  above.children = above.children.filter((child) => child !== id);
  above.selected = Math.max(0, Math.min(above.selected, above.children.length - 1));
  const rest = [id];
  while (rest.length > 0) {
    const next = rest.pop();
    rest.push(...conversation.messages[next].children);
    delete conversation.messages[next];
  }
}

/** Selects the sibling of a message that is `step` places after it. */
export function selectSibling(conversation, id, step) {
  const above = conversation.messages[conversation.messages[id].parent];
  above.selected = Math.max(0, Math.min(above.children.length - 1, above.selected + step));
}

/** Returns the place of a message among its siblings, and their number. */
export function placeOf(conversation, id) {
  const { children } = conversation.messages[conversation.messages[id].parent];
  return { index: children.indexOf(id), count: children.length };
}

/** Returns the messages of the selected branch, the first one first. */
export function branch(conversation) {
  const messages = [];
  let at = conversation.messages[ROOT];
  while (at.children.length > 0) {
    at = conversation.messages[at.children[at.selected]];
    messages.push(at);
  }
  return messages;
}

/** Returns the messages from the first one down to `id`. */
export function pathTo(conversation, id) {
  const path = [];
  for (let at = conversation.messages[id]; at.id !== ROOT; at = conversation.messages[at.parent]) path.unshift(at);
  return path;
}

/** Returns a copy to keep. The `answer` that is being generated is left out while it is empty, since it may fail. */
export function keptCopy(conversation, answer) {
  const copy = structuredClone(conversation);
  if (answer && isEmpty(answer) && Object.hasOwn(copy.messages, answer.id)) removeMessage(copy, answer.id);
  return copy;
}

/** Returns whether an answer has nothing yet. */
export function isEmpty({ content, reasoning, toolCalls }) {
  return !content && !reasoning && !toolCalls?.length;
}

/**
 * Changes a conversation as another tab did, from `base` to `theirs`. Messages of both tabs stay, as branches if they have
 * one parent. What both have changed stays as it is here. The shown branch stays, too, and may become longer.
 */
export function mergeInto(conversation, base, theirs) {
  for (const name of ["title", "settings"]) {
    if (isSame(conversation[name], base[name]) && !isSame(base[name], theirs[name])) {
      conversation[name] = structuredClone(theirs[name]);
    }
  }
  const { messages } = conversation;
  for (const given of Object.values(theirs.messages)) {
    const own = messages[given.id];
    if (!own) {
      messages[given.id] = structuredClone(given);
      continue;
    }
    const { children, selected, ...fields } = structuredClone(given);
    const { children: _, selected: __, ...before } = base.messages[given.id] ?? given;
    if (Object.keys(before).every((name) => isSame(own[name], before[name]))) Object.assign(own, fields);
    const shown = own.children[own.selected];
    own.children = [...children, ...own.children.filter((child) => !children.includes(child))];
    own.selected = shown ? own.children.indexOf(shown) : selected;
  }
}

function isSame(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

/** Returns messages in the form of the API, after the system prompt if there is one. */
export function toApi(messages, system) {
  const converted = messages.map((message) => {
    const { role, content, toolCalls, toolCallId } = message;
    if (role === "tool") return { role, content, tool_call_id: toolCallId };
    if (toolCalls?.length) return { role, content: content || null, tool_calls: toolCalls };
    return { role, content };
  });
  return system.trim() ? [{ role: "system", content: system }, ...converted] : converted;
}

/** Returns the branch as markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.settings.system.trim()) parts.push(`**System**\n\n${conversation.settings.system}`);
  for (const { role, content, toolCalls } of branch(conversation)) {
    const calls = (toolCalls ?? []).map((call) => `\`${call.function.name}(${call.function.arguments})\``);
    parts.push(`**${role[0].toUpperCase()}${role.slice(1)}**`, ...[content, ...calls].filter(Boolean));
  }
  return parts.join("\n\n") + "\n";
}

/** Returns the conversation that an imported file has, or null unless it is one whose messages form a tree. */
export function fromImport(value) {
  const given = value?.messages;
  if (typeof given !== "object" || given === null || !given[ROOT]) return null;
  const messages = {};
  const rest = [[ROOT, null]];
  while (rest.length > 0) {
    const [id, parent] = rest.pop();
    const message = Object.hasOwn(messages, id) ? null : importedMessage(given[id], id, parent);
    if (!message) return null;
    messages[id] = message;
    rest.push(...message.children.map((child) => [child, id]));
  }
  const now = Date.now();
  return {
    id: newId(),
    title: text(value.title),
    created: Number(value.created) || now,
    updated: now,
    settings: value.settings ?? {},
    messages,
  };
}

function text(value) {
  return typeof value === "string" ? value : "";
}

/** Returns a message with the known fields of an imported one, or null if something is wrong with it. */
function importedMessage(given, id, parent) {
  const roles = parent === null ? ["root"] : ["user", "assistant", "tool"];
  if (!given || given.parent !== parent || !roles.includes(given.role) || typeof given.content !== "string") return null;
  if (!Array.isArray(given.children) || !given.children.every((child) => typeof child === "string")) return null;
  const { role, content, children } = given;
  const selected = Number.isInteger(given.selected) ? given.selected : 0;
  const last = Math.max(0, children.length - 1);
  const message = { id, parent, role, content, children: [...children], selected: Math.max(0, Math.min(last, selected)) };
  if (text(given.reasoning)) message.reasoning = given.reasoning;
  if (text(given.note)) message.note = given.note;
  if (text(given.toolCallId)) message.toolCallId = given.toolCallId;
  if (Array.isArray(given.toolCalls)) {
    message.toolCalls = given.toolCalls.map((call) => ({
      id: text(call?.id),
      type: "function",
      function: { name: text(call?.function?.name), arguments: text(call?.function?.arguments) },
    }));
  }
  const { tokens, prompt, seconds } = given.speed ?? {};
  if ([tokens, prompt, seconds].every(Number.isFinite)) message.speed = { tokens, prompt, seconds };
  return message;
}
