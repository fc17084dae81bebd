"""The requests of `benchmarks.clients langchain`, run by the Python of LangChain's environment.

python langchain_requests.py URL MODEL REQUESTS RESULTS.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

CONCURRENCY = 8


class Tally:
    """Answers that came, and what was wrong with them."""

    def __init__(self) -> None:
        self.requests = 0
        self.wrong: list[str] = []

    def take(self, message: Any) -> None:
        self.requests += 1
        text = message if isinstance(message, str) else message.content
        if not text:
            self.wrong.append("an empty answer")
        usage = None if isinstance(message, str) else message.usage_metadata
        if usage is not None and usage["total_tokens"] != usage["input_tokens"] + usage["output_tokens"]:
            self.wrong.append(f"wrong usage: {usage}")

    def expect(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.wrong.append(what)


def main() -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    url, name, count, results = sys.argv[1:]
    given = {"base_url": f"{url}/v1", "api_key": "unused", "model": name, "max_retries": 0, "temperature": 0}
    chat = ChatOpenAI(**given, max_tokens=8)
    plain = OpenAI(**given, max_tokens=8)
    tally = Tally()
    questions = [f"Name a colour that goes well with the number {index}." for index in range(int(count) // 5)]
    _one_by_one(chat, questions[: len(questions) // 4], tally)
    for message in chat.batch(questions, {"max_concurrency": CONCURRENCY}):
        tally.take(message)
    _completions(plain, len(questions), tally)
    asyncio.run(_at_once(chat, questions, tally))
    _details(chat, tally)
    while tally.requests < int(count):
        tally.take(chat.invoke(f"Say {tally.requests}."))
    found = {"requests": tally.requests, "errors": len(tally.wrong), "wrong": tally.wrong[:10]}
    Path(results).write_text(json.dumps(found))
    print(json.dumps(found))


def _one_by_one(chat: Any, questions: list[str], tally: Tally) -> None:
    for question in questions:
        messages = [("system", "Answer in one word."), ("human", question)]
        whole = chat.invoke(messages)
        tally.take(whole)
        joined = reduce(add, chat.stream(messages, stream_usage=True))
        tally.take(joined)
        tally.expect(joined.content == whole.content, "a stream differs from its answer")
        tally.expect(
            joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"],
            "a stream counts other tokens than its answer",
        )


def _completions(plain: Any, count: int, tally: Tally) -> None:
    """LangChain puts as many prompts into one request as may be under way at once."""
    prompts = [f"The colour that goes well with the number {index} is" for index in range(count)]
    for start in range(0, count, CONCURRENCY):
        texts = plain.batch(prompts[start : start + CONCURRENCY], {"max_concurrency": CONCURRENCY})
        tally.take("".join(texts))
        tally.expect(all(texts), "an empty completion")


async def _at_once(chat: Any, questions: list[str], tally: Tally) -> None:
    for message in await chat.abatch(questions, {"max_concurrency": CONCURRENCY}):
        tally.take(message)

    async def read(question: str) -> str:
        return "".join([piece.content async for piece in chat.astream(question)])

    for start in range(0, len(questions), CONCURRENCY):
        for text in await asyncio.gather(*map(read, questions[start : start + CONCURRENCY])):
            tally.take(text)


def _details(chat: Any, tally: Tally) -> None:
    """Log probabilities, stop strings, seeds, and an error that is the client's own."""
    import openai

    message = chat.bind(logprobs=True, top_logprobs=2).invoke("Say yes.")
    tally.take(message)
    content = message.response_metadata["logprobs"]["content"]
    tally.expect(
        "".join(entry["token"] for entry in content) == message.content, "logprobs differ from the text"
    )
    stopped = chat.bind(stop=[message.content[2:4]]).invoke("Say yes.")
    tally.expect(message.content.startswith(stopped.content), "a stop string changed the text")
    tally.expect(len(stopped.content) < len(message.content), "a stop string did not stop")
    tally.requests += 1
    drawn = [chat.bind(seed=3, temperature=1.0).invoke("Say something.").content for _ in range(2)]
    tally.expect(drawn[0] == drawn[1], "a seed gave two answers")
    tally.requests += 2
    try:  # the one request that has to fail
        chat.bind(max_tokens=0).invoke("x")
    except openai.BadRequestError:
        return
    tally.wrong.append("a bad request was accepted")


if __name__ == "__main__":
    main()
