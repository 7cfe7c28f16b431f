// Requests to the server that this page came from, with the API key of this tab.

import { kept } from "./storage.js";

const base = new URL(".", document.baseURI);
const key = kept("sessionStorage", "api-key");

/** An answer with an error status, with the server's message. */
export class ApiError extends Error {
  constructor(status, message, param) {
    super(param ? `${message} (${param})` : message);
    this.status = status;
  }
}

export function apiKey() {
  return key.get();
}

export function setApiKey(value) {
  key.set(value);
}

/** Asks for a key; set by the page. Resolves to whether one was given. */
let askForKey = async () => false;

export function onKeyNeeded(ask) {
  askForKey = ask;
}

/**
 * Sends a request, and asks for a key and repeats it if the server requires one.
 * @returns {Promise<Response>}
 */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const headers = {};
    const sent = apiKey();
    if (sent) headers.Authorization = `Bearer ${sent}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(new URL(path, base), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    // Another request may have asked already.
    if (apiKey() === sent && !(await askForKey(error.message))) throw error;
  }
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const { message, param, code } = JSON.parse(text).error;
    // The page and the server have one origin, unless a proxy hides the page's address from the server.
    const hint = code === "cross_origin" ? " A proxy in between must pass on the Host header (docs/web_page.md)." : "";
    return new ApiError(response.status, message + hint, param);
  } catch {
    return new ApiError(response.status, text.trim() || `The server answered with status ${response.status}.`);
  }
}

/** Yields the events of an answer of the API, which ends with `[DONE]`. Throws an error if it ends before that. */
export async function* answerEvents(path, options) {
  for await (const data of events(path, options)) {
    if (data === DONE) return;
    yield data;
  }
  throw new Error("The connection ended before the answer was complete.");
}

const DONE = Symbol("done");

/** Yields the data of server-sent events, parsed as JSON, and `DONE` for `[DONE]`. An `error` in the data is thrown. */
export async function* events(path, options) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      const blocks = buffer.split(/\r?\n\r?\n/);
      buffer = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length === 0) continue;
        const data = lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
        if (data === "[DONE]") {
          yield DONE;
          return;
        }
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(500, parsed.error.message, parsed.error.param);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
