// Elements, made without a line of HTML in a string: whatever a text holds, it stays text.

export const byId = (id) => document.getElementById(id);

// `attributes` are set by name; a function is a listener, `text` the content; null, undefined and false are left out.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "text") made.textContent = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function button(text, onClick, attributes = {}) {
  return element("button", { type: "button", text, click: onClick, ...attributes });
}

// Writes to the clipboard and says so on the button. Without a secure origin there is no clipboard API.
export async function copy(text, place) {
  const before = place.textContent;
  place.textContent = (await written(text)) ? "Copied" : "Not copied";
  setTimeout(() => (place.textContent = before), 1500);
}

async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "unseen" });
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
