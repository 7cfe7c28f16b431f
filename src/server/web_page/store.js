// Conversations in this browser's IndexedDB, which tabs share. Where that is not allowed, they are kept until the page is
// closed.
import { keptCopy, mergeInto } from "./conversation.js";
import { databaseName } from "./storage.js";

const CONVERSATIONS = "conversations";

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(databaseName(), 1);
    request.onupgradeneeded = () => request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Resolves once all of a transaction is kept. */
function committed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new Error("the browser did not keep it"));
  });
}

/**
 * Opens the store. `isKept` is whether conversations outlive the page. `changed` is called with the id of each conversation
 * that another tab changes or removes.
 */
export async function openStore(changed) {
  try {
    return new SharedStore(await open(), changed);
  } catch {
    return new TabStore();
  }
}

/** Conversations that other tabs may change, too. Changes of other tabs are merged, except by `putLast`. */
class SharedStore {
  isKept = true;

  constructor(database, changed) {
    this.database = database;
    // Each conversation as it was kept when this tab last read or wrote it.
    this.seen = new Map();
    this.channel = new BroadcastChannel(databaseName());
    this.channel.addEventListener("message", ({ data }) => changed(data));
  }

  conversations(mode) {
    return this.database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS);
  }

  async all() {
    const all = await result(this.conversations("readonly").getAll());
    return all.map((kept) => this.see(kept));
  }

  /** Resolves to the conversation, or undefined if there is none. */
  async get(id) {
    const kept = await result(this.conversations("readonly").get(id));
    return kept && this.see(kept);
  }

  /** Merges what other tabs have changed into a conversation. Resolves to false if one of them has removed it. */
  async refresh(conversation) {
    return this.merge(conversation, await result(this.conversations("readonly").get(conversation.id)));
  }

  /**
   * Merges what other tabs have changed into a conversation, and keeps it. Resolves to false if one of them has removed it.
   * `generating` returns the answer that is being generated, if there is one.
   */
  async put(conversation, generating) {
    // One transaction, so that no other tab writes in between.
    const conversations = this.conversations("readwrite");
    if (!this.merge(conversation, await result(conversations.get(conversation.id)))) return false;
    await this.write(conversations, conversation, generating);
    return true;
  }

  /** Keeps a conversation of a page that is being closed, and has no time to read first. */
  putLast(conversation, generating) {
    return this.write(this.conversations("readwrite"), conversation, generating);
  }

  async remove(id) {
    this.seen.delete(id);
    await result(this.conversations("readwrite").delete(id));
    this.channel.postMessage(id);
  }

  async write(conversations, conversation, generating) {
    const copy = keptCopy(conversation, generating());
    conversations.put(copy);
    await committed(conversations.transaction);
    // Not before: what was not kept is neither a base to merge from, nor has another tab removed it.
    this.seen.set(copy.id, copy);
    this.channel.postMessage(copy.id);
  }

  merge(conversation, kept) {
    const seen = this.seen.get(conversation.id);
    if (!kept) return !seen;
    mergeInto(conversation, seen ?? kept, kept);
    this.seen.set(kept.id, kept);
    return true;
  }

  see(kept) {
    this.seen.set(kept.id, structuredClone(kept));
    return kept;
  }
}

/** The conversations of this tab. */
class TabStore {
  isKept = false;

  all = async () => [];
  put = async () => true;
  putLast = async () => {};
  remove = async () => {};
}
