// What requests are called: the id their client was given and, where the server may show prompts, the first words.

const MOST = 8192, SHORT = 8; // characters of an id that tell it from others
const OWN = 2 ** 40; // the first number of what the engine computes itself, for requests that wait for a context

export class Names {
  constructor() {
    this.known = new Map(); // number -> { id, words, first }
    this.later = new Map(); // first -> the numbers a request had in further engines
  }

  // As messages bring them: the numbers of a request's branches, its id, the first words of its prompt; of one that went on
  // in another engine, where it has other numbers, the first one that it came with.
  add(named) {
    for (const [numbers, id, words, first] of named) {
      numbers.forEach((number) => {
        const own = first === undefined ? number : number - numbers[0] + first;
        this.known.set(number, { id, words, first: own });
        if (own !== number) this.later.set(own, [...new Set([...(this.later.get(own) ?? []), number])]);
      });
    }
    for (const first of this.later.keys()) if (this.later.size > MOST) this.later.delete(first);
    for (const number of this.known.keys()) {
      if (this.known.size <= MOST) return;
      this.known.delete(number);
    }
  }

  // The number a request came with, and all that it has had.
  firstOf(number) {
    return this.known.get(number)?.first ?? number;
  }

  numbersOf(first) {
    return [first, ...(this.later.get(first) ?? [])];
  }

  // The same in no more characters than there is room for.
  shortLabel(request, most) {
    const label = this.label(request);
    return label.length > most ? `${label.slice(0, most - 1)}…` : label;
  }

  // Its number, and what tells it from others; a tenant where there are several.
  label(request, tenant = "") {
    const { id = "", words = "" } = this.known.get(request) ?? {}, name = request < OWN ? this.firstOf(request) : `context ${request - OWN + 1}`;
    return [name, tenant, words || id.slice(0, SHORT)].filter((part) => part !== "").join(" · ");
  }
}
