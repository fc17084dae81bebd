// Elements, made without a line of HTML in a string: whatever a text holds, it stays text.

export const byId = (id) => document.getElementById(id);

// A function is a listener and `text` the content; the rest are properties or attributes. Null and undefined are left out.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "text") made.textContent = value;
    else if (name in made && typeof made[name] !== "object") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function button(text, onClick, attributes = {}) {
  return element("button", { type: "button", text, click: onClick, ...attributes });
}

// `text` is a function: what it returns when the button is pressed is copied.
export function copyButton(text, attributes = {}) {
  return button("Copy", (event) => copy(text(), event.currentTarget), attributes);
}

// Writes to the clipboard and shows the result on the button. Without a secure origin there is no clipboard API.
async function copy(text, place) {
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
