// Conversations in this browser's IndexedDB. Where that is not allowed, they are kept until the page is closed.
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

/** Opens the store. `isKept` is whether conversations outlive the page. */
export async function openStore() {
  try {
    const database = await open();
    const conversations = (mode) => database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS);
    return {
      isKept: true,
      all: () => result(conversations("readonly").getAll()),
      put: (conversation) => result(conversations("readwrite").put(structuredClone(conversation))),
      remove: (id) => result(conversations("readwrite").delete(id)),
    };
  } catch {
    const kept = new Map();
    return {
      isKept: false,
      all: async () => [...kept.values()],
      put: async (conversation) => void kept.set(conversation.id, structuredClone(conversation)),
      remove: async (id) => void kept.delete(id),
    };
  }
}
