// The page's colours, read from its style once for each theme: asking for them in every frame would cost more than drawing.

const NAMES = ["line", "quiet", "ink", "panel", "accent", "band", "prefill", "redo", "decode", "padding", "placed", "encode", "recompute", "swap", "finish", "vector",
  "fail", "held", "shared", "cached", "free", "evicted"];
const listeners = [];
let kept = null;

export function palette() {
  if (!kept) {
    const style = getComputedStyle(document.documentElement);
    kept = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return kept;
}

export function onTheme(listener) {
  listeners.push(listener);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  kept = null;
  for (const listener of listeners) listener();
});
