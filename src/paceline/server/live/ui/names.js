// What requests are called: the id their client was given and, where the server may show prompts, the first words.

const MOST = 8192, SHORT = 8; // characters of an id that tell it from others
const OWN = 2 ** 40; // the first number of what the engine computes itself, for requests that wait for a context

export class Names {
  constructor() {
    this.known = new Map(); // number -> { id, words }
  }

  // As messages bring them: the numbers of a request's branches, its id, the first words of its prompt.
  add(named) {
    for (const [numbers, id, words] of named) for (const number of numbers) this.known.set(number, { id, words });
    for (const number of this.known.keys()) {
      if (this.known.size <= MOST) return;
      this.known.delete(number);
    }
  }

  // The same in no more characters than there is room for.
  shortLabel(request, most) {
    const label = this.label(request);
    return label.length > most ? `${label.slice(0, most - 1)}…` : label;
  }

  // Its number, and what tells it from others; a tenant where there are several.
  label(request, tenant = "") {
    const { id = "", words = "" } = this.known.get(request) ?? {}, name = request < OWN ? request : `context ${request - OWN + 1}`;
    return [name, tenant, words || id.slice(0, SHORT)].filter((part) => part !== "").join(" · ");
  }
}
