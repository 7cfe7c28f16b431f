// Small texts that the page keeps, for this address only; and until the page is closed where the browser keeps nothing.

/** Separates servers that share a host under different paths. */
const PREFIX = `mainstem:${new URL(".", document.baseURI).pathname}:`;

/** Returns access to one text of a storage, `localStorage` or `sessionStorage` by name. */
export function kept(storage, name) {
  let memory = "";
  return {
    get() {
      try {
        return window[storage].getItem(PREFIX + name) ?? memory;
      } catch {
        return memory;
      }
    },
    set(value) {
      memory = value;
      try {
        if (value) window[storage].setItem(PREFIX + name, value);
        else window[storage].removeItem(PREFIX + name);
      } catch {
        // The browser does not allow it.
      }
    },
  };
}

/** Returns the name of this server's database. */
export function databaseName() {
  return PREFIX;
}
