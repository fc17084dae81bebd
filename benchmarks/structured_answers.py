"""Do answers with a form have it, whatever happens to their requests?

A random model and SmolLM2 answer in forms with every keyword of a schema that is kept to, in patterns, grammars and
choices (tests/native/structured_forms.py), with drafts and with so few KV blocks that requests are preempted. Part of
them has several answers or is forked under way. Every answer that is not cut off by its length is judged by jsonschema
and re; none may run into whitespace.

    python -m benchmarks.structured_answers [--answers 2000] [--model FOLDER|FILE]
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

from benchmarks.harness import Benchmark, Found, Given, flag, rows_of
from paceline import AsyncLLM, SamplingParams
from paceline.core.structure import Structure
from paceline.errors import InvalidTransition
from tests.model_folder import write_model
from tests.native.structured_forms import Judge, forms

bench = Benchmark(__doc__)
CLIENTS = (1, 2, 4, 8, 16)
# All of 16 requests together want several times as many.
OPTIONS = {"max_num_seqs": 16, "max_model_len": 512, "block_size": 16, "num_gpu_blocks_override": 40}
MOST_TOKENS = 200
MOST_WHITESPACE = 8  # in a row, anywhere in JSON; the forms have no longer one inside
Forms = Iterator[tuple[Structure, Judge]]
Ended = tuple[str, str]  # text, reason


@dataclass
class Tally:
    """What became of the answers."""

    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return self.reasons.total()

    def take(self, text: str, reason: str, is_right: Callable[[str], bool], form: str) -> None:
        self.reasons[reason] += 1
        if len(text) - len(text.rstrip()) > MOST_WHITESPACE:
            self.wrong.append(f"{form}: ends in whitespace: {text!r}")
        if reason not in ("stop", "length"):
            self.wrong.append(f"{form}: ended by {reason}")
        elif reason == "stop" and not is_right(text):
            self.wrong.append(f"{form}: {text!r}")


async def plainly(llm: AsyncLLM, prompt: str, params: SamplingParams) -> list[Ended]:
    outputs = [output async for output in llm.generate(prompt, params)]
    return [(part.text, part.finish_reason or "") for part in outputs[-1].outputs]


async def twice(llm: AsyncLLM, prompt: str, params: SamplingParams) -> list[Ended]:
    return await plainly(llm, prompt, replace(params, n=2))


async def forked(llm: AsyncLLM, prompt: str, params: SamplingParams) -> list[Ended]:
    """Held behind a few tokens and forked there; the parent goes on beside its branches."""
    async with llm.tree(prompt, params) as tree:
        tree.root.until(max_tokens=5)
        async for branch in tree.held():
            if branch is tree.root and len(tree.branches) == 1 and branch.held == "length":
                with suppress(InvalidTransition):  # those few tokens were all of it
                    await branch.fork(2, temperature=1.0, max_tokens=MOST_TOKENS)
                    await branch.extend(max_tokens=MOST_TOKENS)
        return [(branch.text, branch.held or branch.output.finish_reason or "") for branch in tree.branches]


async def ask(llm: AsyncLLM, clients: int, answers: int, draw: random.Random, waiting: Forms) -> Tally:
    """This number of clients, each with one request at a time, until there are enough answers."""
    tally = Tally()

    async def client() -> None:
        while tally.answers < answers:
            structure, is_right = next(waiting)
            params = SamplingParams(
                max_tokens=MOST_TOKENS,
                temperature=draw.choice((0.0, 1.0)),
                seed=draw.randrange(1000),
                structured_outputs=structure,
            )
            way = draw.choice((plainly, twice, forked))
            prompt = f"Answer as {structure.kind}: " * draw.randrange(1, 6)
            for text, reason in await way(llm, prompt, params):
                tally.take(text, reason, is_right, f"{structure.kind} {structure.source:.200}")

    await asyncio.gather(*(client() for _ in range(clients)))
    return tally


async def answered(model: Path | None, answers: int, clients: tuple[int, ...] = CLIENTS) -> list[Found]:
    """The same part of the answers for each number of clients. No model: one of random weights."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS, "speculative_config": "auto"}
        if model is None:
            options["load_format"] = "dummy"
            model = write_model(Path(folder), max_position_embeddings=OPTIONS["max_model_len"])
        async with AsyncLLM(str(model), **options) as llm:
            draw = random.Random(1)
            known = [form for compact in (True, False) for form in forms(compact=compact)]
            draw.shuffle(known)
            waiting = cycle(known)
            found, counters = [], llm._engine.scheduler.state.counters
            for count in clients:
                before = (counters.preempted, counters.accepted_tokens, counters.forked)
                tally = await ask(llm, count, -(-answers // len(clients)), draw, waiting)
                after = (counters.preempted, counters.accepted_tokens, counters.forked)
                preempted, accepted, forks = (now - then for now, then in zip(after, before, strict=True))
                found.append(
                    {
                        "clients": count,
                        "answers": tally.answers,
                        "complete": tally.reasons["stop"],
                        "cut off": tally.reasons["length"],
                        "wrong": len(tally.wrong),
                        "preempted": preempted,
                        "accepted drafts": accepted,
                        "forks": forks,
                        "examples": tally.wrong[:5],
                    }
                )
            return found


@bench.part(
    flag("--answers", 2000, "of both models together"),
    flag("--model", None, "folder or GGUF file (default: SmolLM2-135M-Instruct)"),
)
def structured_answers(given: Given) -> Found:
    """Answers of both models, and how many do not have their form."""
    from paceline.models.files.fetch import resolve

    models = {"random": None, "smollm2": Path(resolve(given.model, None, None))}
    found = rows_of(
        {"model": name, **row}
        for name, model in models.items()
        for row in asyncio.run(answered(model, given.answers // len(models)))
    )
    return {"wrong": sum(row["wrong"] for row in found), "rows": found}


if __name__ == "__main__":
    bench.main()
