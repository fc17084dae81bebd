// The branches of an answer side by side.

import { button, element } from "../dom.js";

// `views` shows them from left to right; `actions` are use and prune, or null where the conversation has gone on.
export function sideBySide(message, views, actions) {
  const columns = views.map((view, at) => column(view, `Branch ${at + 1}`, view.message === message, actions));
  return element("section", { class: "branches", "aria-label": `${views.length} branches of an answer`, tabIndex: 0 }, ...columns);
}

function column(view, name, isChosen, actions) {
  const use = actions && button("Use this", () => actions.use(view.message), { "aria-label": `Use ${name}`, title: "The conversation goes on with this branch" });
  const prune = actions && button("Prune", () => actions.prune(view.message), { "aria-label": `Prune ${name}`, title: "End this branch and take it away" });
  const chosen = element("span", { class: "quiet", text: "the answer" });
  const head = element("div", { class: "branch-head" }, element("b", { text: name }), isChosen ? chosen : use, prune);
  return element("div", { class: isChosen ? "branch chosen" : "branch" }, head, view.root);
}
