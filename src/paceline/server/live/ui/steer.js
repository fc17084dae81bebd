// The dial and the policy: how they stand, and changing them. What the server refuses is shown in its own words.

import { ask } from "./feed.js";

const DIAL = "/v1/admin/dial", POLICY = "/v1/admin/policy", EVERY_MS = 5000;

export class Steering {
  constructor(place, policies, ofModel) {
    Object.assign(this, { place, dial: ofModel(DIAL), policyPath: ofModel(POLICY) });
    const find = (id) => place.querySelector(`#steer-${id}`);
    Object.assign(this, { position: find("position"), shown: find("shown"), kind: find("kind"), target: find("target") });
    Object.assign(this, { policy: find("policy"), note: find("note"), problem: find("problem") });
    this.policy.replaceChildren(...policies.map((name) => new Option(name)));
    this.position.addEventListener("input", () => this.stand(Number(this.position.value)));
    this.position.addEventListener("change", () => this.turn({ position: Number(this.position.value) }));
    find("hold").addEventListener("submit", (event) => {
      event.preventDefault();
      this.turn({ [this.kind.value]: Number(this.target.value) });
    });
    find("off").addEventListener("click", () => this.turn({ off: true }));
    this.policy.addEventListener("change", () => this.change(this.policy.value));
    this.refresh();
    setInterval(() => document.hidden || this.refresh(), EVERY_MS);
  }

  async turn(setting) {
    await this.attempt(async () => this.showDial(await ask(this.dial, setting)));
  }

  async change(name) {
    await this.attempt(async () => this.showPolicy(await ask(this.policyPath, { policy: name })));
  }

  async attempt(change) {
    try {
      await change();
      this.problem.textContent = "";
    } catch (error) {
      this.problem.textContent = error.message;
      await this.refresh(); // the controls go back to what holds
    }
  }

  async refresh() {
    try {
      this.showDial(await ask(this.dial));
      this.showPolicy(await ask(this.policyPath));
      this.place.hidden = false;
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  showDial(dial) {
    if (document.activeElement !== this.position) {
      this.position.value = dial.position;
      this.stand(dial.state === "off" ? null : dial.position);
    }
    this.note.textContent = dial.sentences.join(" ");
  }

  // How the slider looks: at a position, or off, with none.
  stand(position) {
    const shown = position === null ? "off" : position.toFixed(2);
    this.shown.textContent = shown;
    this.position.setAttribute("aria-valuetext", shown);
    this.position.classList.toggle("off", position === null);
  }

  showPolicy(found) {
    if (document.activeElement === this.policy) return;
    if (![...this.policy.options].some((option) => option.value === found.policy)) this.policy.add(new Option(found.policy));
    this.policy.value = found.policy;
  }
}
