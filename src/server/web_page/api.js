// Requests to the server that this page came from, with the API key of this tab.

const base = new URL(".", document.baseURI);
const KEY = "mainstem-api-key";

/** An answer with an error status, with the server's message. */
export class ApiError extends Error {
  constructor(status, message, param) {
    super(param ? `${message} (${param})` : message);
    this.status = status;
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
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
    if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(new URL(path, base), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || !(await askForKey(error.message))) throw error;
  }
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const { message, param } = JSON.parse(text).error;
    return new ApiError(response.status, message, param);
  } catch {
    return new ApiError(response.status, text.trim() || `The server answered with status ${response.status}.`);
  }
}

/**
 * Yields the data of the server-sent events of an answer, parsed as JSON, until the end or `[DONE]`.
 * An `error` in the data is thrown.
 */
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
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(500, parsed.error.message, parsed.error.param);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
