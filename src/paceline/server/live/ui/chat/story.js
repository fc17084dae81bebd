// The drawer that explains an answer: its figures, and the engine's decisions about its request in sentences.

import { ask } from "../feed.js";
import { byId, element } from "../dom.js";
import { laneOf } from "./message.js";

const AGAIN_MS = 1000;

export async function showStory(dialog, message) {
  const { request, branch = 0 } = message, sentences = byId("story-sentences");
  const line = (text) => element("li", { text });
  byId("story-lane").href = laneOf(message);
  sentences.replaceChildren(line("…"));
  showFigures(message);
  dialog.dataset.request = `${request}/${branch}`;
  dialog.showModal();
  const isShown = () => dialog.open && dialog.dataset.request === `${request}/${branch}`;
  while (isShown()) {
    try {
      const found = await ask(`/v1/requests/${encodeURIComponent(request)}/explain`), branches = found.branches.filter(({ index = 0 }) => index === branch);
      if (!isShown()) return;
      sentences.replaceChildren(...branches.flatMap((branch) => branch.sentences.map(line)));
      showFigures(message);
      if (branches.every((branch) => ["ended", "refused"].includes(branch.state))) return;
    } catch (error) {
      const isGone = error.status === 404;
      sentences.replaceChildren(line(isGone ? "The server no longer knows this request: it keeps the newest ones, until it is restarted." : error.message));
      return;
    }
    await new Promise((wake) => setTimeout(wake, AGAIN_MS));
  }
}

function showFigures({ request, tokens, rate, ttft, finish }) {
  const rows = [
    ["Request", request],
    ["Tokens", tokens?.toLocaleString("en")],
    ["Tokens per second", rate?.toFixed(1)],
    ["First token", ttft === undefined ? undefined : `after ${ttft.toLocaleString("en")} ms`],
    ["Ended by", { stop: "the model", length: "the maximum length", tool_calls: "the model, with a call" }[finish]],
  ];
  const shown = rows.filter(([, value]) => value !== undefined);
  byId("story-figures").replaceChildren(...shown.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })]));
}
