// A conversation is a tree of messages: an edited message and a regenerated answer are siblings of the old ones. The
// shown branch follows from the child that is selected at each message.

/** @typedef {{id: string, parent: string, role: string, content: string, reasoning?: string, toolCalls?: object[],
 *   toolCallId?: string, note?: string, children: string[], selected: number}} Message */

/** Id of the root, which is no message. */
export const ROOT = "root";

/** Creates an empty conversation with these settings. */
export function newConversation(settings) {
  const now = Date.now();
  const root = { id: ROOT, parent: null, role: "root", content: "", children: [], selected: 0 };
  return { id: crypto.randomUUID(), title: "", created: now, updated: now, settings, messages: { [ROOT]: root } };
}

/** Adds a message below `parent`, and selects it. */
export function addMessage(conversation, parent, fields) {
  const message = { id: crypto.randomUUID(), parent, content: "", children: [], selected: 0, ...fields };
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

/** Checks an imported conversation. Returns null unless it is one whose messages form a tree. */
export function fromImport(value) {
  const messages = value?.messages;
  if (typeof messages !== "object" || messages === null || !messages[ROOT]) return null;
  const seen = new Set();
  const rest = [ROOT];
  while (rest.length > 0) {
    const id = rest.pop();
    const message = messages[id];
    if (seen.has(id) || !message || typeof message.content !== "string" || !Array.isArray(message.children)) return null;
    if (id !== ROOT && !["user", "assistant", "tool"].includes(message.role)) return null;
    if (!message.children.every((child) => messages[child]?.parent === id)) return null;
    seen.add(id);
    message.id = id;
    message.selected = Number.isInteger(message.selected)
      ? Math.max(0, Math.min(message.children.length - 1, message.selected))
      : 0;
    rest.push(...message.children);
  }
  const kept = Object.fromEntries([...seen].map((id) => [id, messages[id]]));
  const now = Date.now();
  return {
    id: crypto.randomUUID(),
    title: typeof value.title === "string" ? value.title : "",
    created: Number(value.created) || now,
    updated: now,
    settings: value.settings ?? {},
    messages: kept,
  };
}
