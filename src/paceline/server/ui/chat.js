// A little traffic from the page itself: the same message a few times at once, streamed.

import { events, headers } from "./feed.js";

const TOKENS = 120;

export function chat(form, answers, model) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = form.querySelector("textarea").value.trim(), times = Number(form.querySelector("input").value) || 1;
    if (!text) return;
    answers.replaceChildren();
    for (let number = 0; number < Math.min(times, 32); number++) send(text, answers, model());
  });
}

async function send(text, answers, model) {
  const place = document.createElement("p");
  answers.append(place);
  try {
    const answer = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ model, messages: [{ role: "user", content: text }], stream: true, max_tokens: TOKENS, temperature: 0.8 }),
    });
    if (!answer.ok) throw new Error((await answer.json()).error?.message || answer.statusText);
    for await (const chunk of events(answer.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      place.textContent += chunk.choices?.[0]?.delta?.content || "";
    }
  } catch (error) {
    place.textContent += ` [${error.message}]`;
  }
}
