// Helpers to build elements. Text always becomes text nodes, so nothing that a model or a user writes is markup.

/**
 * Creates an element. Attributes whose value is null or false are left out; functions become event listeners.
 * @param {string} tag
 * @param {Object<string, any>} [attributes]
 * @param {...(Node|string|null|undefined|false)} children
 * @returns {HTMLElement}
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Announces a message to screen readers. */
export function announce(message) {
  document.getElementById("status").textContent = message;
}

/** Returns a labelled input. `describe` is a hint that screen readers read with it. */
export function field(label, input, describe) {
  const id = input.id || `field-${++fields}`;
  input.id = id;
  const hint = describe ? el("small", { id: `${id}-hint` }, describe) : null;
  if (hint) input.setAttribute("aria-describedby", hint.id);
  return el("div", { class: "field" }, el("label", { for: id }, label), input, hint);
}

let fields = 0;

/** Offers a file for download. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Copies text, and says so on the button for a moment. */
export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
}
