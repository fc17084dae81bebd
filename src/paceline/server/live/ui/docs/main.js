// The API as a page: asks for /openapi.json, with a key where the server has keys, and shows every route with its fields,
// examples and a form that sends a request. Everything the server says is put in as text.

import { ask, keyring } from "../feed.js";
import { byId, element } from "../dom.js";
import { Operation } from "./operation.js";

const RETRY_MS = 1000;
const operations = [];

async function start() {
  let described;
  try {
    described = await ask("/openapi.json");
  } catch (error) {
    if (error.status === 401) return askForKey("This key is wrong: the server does not know it.");
    if (error.status === 403) return askForKey(error.message);
    byId("problem").textContent = `The description of the API cannot be loaded: ${error.message}`;
    byId("problem").hidden = false;
    return setTimeout(start, RETRY_MS);
  }
  byId("problem").hidden = byId("key").hidden = true;
  byId("about").textContent = `version ${described.info.version} · OpenAPI ${described.openapi}`;
  build(described, await servedModel());
}

// The name requests should carry; while the model is being loaded there is none.
async function servedModel() {
  try {
    return (await ask("/v1/models")).data[0].id;
  } catch (error) {
    const isLoading = error.status === 503;
    byId("problem").textContent = isLoading ? "The model is being loaded: routes that need it follow." : "";
    byId("problem").hidden = !isLoading;
    if (isLoading) setTimeout(start, RETRY_MS);
    return null;
  }
}

function askForKey(reason) {
  byId("page").hidden = true;
  byId("key").hidden = false;
  byId("key-problem").textContent = keyring.get() ? reason : "";
  byId("key-text").select();
  byId("key-text").focus();
}

function build(described, model) {
  const groups = new Map(described.tags.map((tag) => [tag.name, []])), places = [], links = [];
  operations.length = 0;
  for (const [path, methods] of Object.entries(described.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      if (method === "head") continue;
      groups.get(operation.tags[0]).push(new Operation(method, path, operation, model));
    }
  }
  for (const [tag, found] of groups) {
    const title = element("h2", { text: tag }), entry = element("h2", { text: tag });
    const group = { title, entry, operations: found };
    operations.push(group);
    places.push(title, ...found.map((each) => each.place));
    links.push(entry, ...found.map((each) => each.link));
  }
  byId("operations").replaceChildren(...places);
  byId("index").replaceChildren(...links);
  byId("page").hidden = false;
  search();
  if (location.hash.length > 1) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

function search() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0, all = 0;
  for (const { title, entry, operations: found } of operations) {
    const visible = found.filter((operation) => operation.match(words)).length;
    title.hidden = entry.hidden = visible === 0;
    shown += visible;
    all += found.length;
  }
  const none = `Nothing matches “${byId("search").value.trim()}”.`;
  byId("found").textContent = words.length ? (shown ? `${shown} of ${all} routes` : none) : `${all} routes`;
}

// The list of routes stands beside them where there is room, and is folded above them where there is none.
const isNarrow = matchMedia("(max-width: 760px)");
const fold = () => (byId("routes").open = !isNarrow.matches);
isNarrow.addEventListener("change", fold);
fold();
byId("index").addEventListener("click", () => isNarrow.matches && fold());
byId("search").addEventListener("input", search);
addEventListener("keydown", (event) => {
  const typing = event.target.closest("input,textarea,select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    byId("search").focus();
  }
  if (event.key === "Escape" && event.target === byId("search")) {
    byId("search").value = "";
    search();
  }
});
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keyring.set(byId("key-text").value.trim());
  start();
});
// A browser sends no key with a link: the document is fetched here and shown as a file of this page.
byId("document").addEventListener("click", async (event) => {
  if (!keyring.get()) return;
  event.preventDefault();
  const text = JSON.stringify(await ask("/openapi.json"), null, 1);
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "openapi.json" });
  link.click();
  URL.revokeObjectURL(link.href);
});
start();
