"""What searches save, and whether they still find what they would find without saving.

*consistency*: votes over multiple-choice questions of BIG-Bench Hard (a folder with its `bbh/*.json` and
`cot-prompts/*.txt`). The model is shown the task's reasoned examples and may reason for a sentence before it answers.
All answers of a full vote are drawn once and kept in a file; the search's own code then asks for them one by one, in
the order in which they would have come, and stops as soon as its leader is certain: how often both have the same
answer, and how many of the samples were asked for. The first questions are also searched for real, which has to give
the same.

*best-of*: several answers to prompts (JSON lines with `turns`), all of them to their end and with the less likely half
pruned at checkpoints: the share of tokens, and how often the answer is one of the best three of all.

    python -m benchmarks.searches consistency --data FOLDER [--questions 200] [--votes FILE]
    python -m benchmarks.searches best-of --data FILE [--prompts 40]
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Benchmark, Found, Given, flag, row, table
from paceline import LLM, SamplingParams
from paceline.core.structure import Structure
from paceline.llm.outputs import CompletionOutput, RequestOutput
from paceline.llm.search import SearchResult, make_search
from paceline.llm.tree import AsyncTree, FindPattern, now
from paceline.text.tokenizer import Tokenizer

bench = Benchmark(__doc__)
ANSWER = r"answer is \(([A-R])\)"
REASONING = r"([^\n(]{1,100}\. )?So the "  # a sentence at most: small models do not come to an end
CERTAINTIES = (0.9, 0.95, 0.97, 0.99)


class Question(NamedTuple):
    task: str
    prompt: str
    form: str  # of its answer


class Said(NamedTuple):
    """One recorded answer."""

    text: str
    num_tokens: int


def questions(folder: Path, count: int) -> list[Question]:
    """Multiple-choice questions of all tasks, the same ones in every run."""
    found = []
    for path in sorted((folder / "bbh").glob("*.json")):
        shown = (folder / "cot-prompts" / f"{path.stem}.txt").read_text().partition("-----\n")[2].strip()
        for example in json.loads(path.read_text())["examples"]:
            asked = example["input"]
            if "\n(B)" in asked and len(asked) < 1500:
                choices = "".join(re.findall(r"^\(([A-R])\)", asked, re.MULTILINE))
                prompt = f"{shown}\n\nQ: {asked}\nA: Let's think step by step.\n"
                found.append(Question(path.stem, prompt, REASONING + ANSWER.replace("A-R", choices) + r"\."))
    random.Random(1).shuffle(found)
    return found[:count]


class Recorded:
    """The backend of a tree whose branches say what was recorded, each after as many steps as it has tokens."""

    tokenizer: Tokenizer | None = None
    find_pattern: FindPattern | None = None

    def __init__(self, said: list[Said]) -> None:
        self.sampling = SamplingParams()
        self._said, self._now, self._ends = said, 0, dict[int, int]()
        root = CompletionOutput(index=0)
        self.output = RequestOutput(request_id="", prompt=None, prompt_token_ids=[], outputs=[root])

    async def ask(self, what: str, *args: Any, **options: Any) -> Any:
        assert what == "fork" and args[0] == 0, "votes are branches of the prompt"
        outputs = self.output.outputs
        made = list(range(len(outputs), len(outputs) + args[1]))
        outputs += [CompletionOutput(index=index) for index in made]
        self._ends |= {index: self._now + self._said[index - 1].num_tokens for index in made}
        return made

    def tell(self, what: str, *args: Any, **options: Any) -> None:
        assert what == "prune", "a vote only ends branches"

    async def settled(self) -> None:
        pass

    async def changed(self) -> None:
        self._now = min(self._ends.values())
        for index in [index for index, end in self._ends.items() if end == self._now]:
            del self._ends[index]
            output = self.output.outputs[index]
            output.text, output.held, output.num_holds = self._said[index - 1].text, "stop", 1

    async def close(self) -> None:
        pass


def drawn(given: Given, model: LLM | None) -> Iterator[tuple[Question, list[Said]]]:
    """The answers of full votes, from the file of earlier runs as far as it has them."""
    path = Path(given.votes) if given.votes else None
    known = {}
    if path is not None and path.exists():
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        known = {entry["prompt"]: [Said(*each) for each in entry["said"]] for entry in entries}
    for question in questions(Path(given.data), given.questions):
        said = known.get(question.prompt)
        if said is None and model is not None:
            with model.tree(question.prompt, sampling(given, question)) as tree:
                branches = tree.root.fork(given.width)
                list(tree.held())
                said = [Said(branch.text, len(branch.token_ids)) for branch in branches]
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps({"prompt": question.prompt, "said": said}) + "\n")
        if said is not None:
            yield question, said


def sampling(given: Given, question: Question) -> SamplingParams:
    form = Structure.of({"regex": question.form})
    return SamplingParams(temperature=given.temperature, max_tokens=120, seed=1, structured_outputs=form)


def voted(said: list[Said], **options: Any) -> SearchResult:
    search = make_search("self_consistency", {"n": len(said), "pattern": ANSWER, **options})
    return now(search.run(AsyncTree(Recorded(said))))


@bench.part(
    flag("--data", "", "folder of the tasks and their reasoned examples"),
    flag("--model", "", "folder, file or name; empty: the default one"),
    flag("--questions", 200),
    flag("--width", 16, "answers of a full vote"),
    flag("--temperature", 0.2, "of the answers; at a higher one a small model's votes are close to chance"),
    flag("--votes", "", "file of drawn answers: those it has are taken from it, others are added"),
    flag("--live", 5, "questions that are searched for real too"),
    flag("--only-known", False, "draw no answers that are not in the file"),
)
def consistency(given: Given) -> Found:
    """Votes that stop early against full ones."""
    model = None if given.only_known else LLM(given.model or None)
    same = dict.fromkeys(CERTAINTIES, 0)
    samples = dict.fromkeys(CERTAINTIES, 0)
    count = live = 0
    for question, said in drawn(given, model):
        count += 1
        full = voted(said, certainty=1.0, parallel=len(said)).answer
        for certainty in CERTAINTIES:
            early = voted(said, certainty=certainty)
            same[certainty] += early.answer == full
            samples[certainty] += early.num_branches
        if model is not None and live < given.live:
            live += 1
            options: dict[str, Any] = {"n": len(said), "pattern": ANSWER}
            real = model.search("self_consistency", question.prompt, sampling(given, question), **options)
            replayed = voted(said)
            assert (real.answer, real.num_branches) == (replayed.answer, replayed.num_branches), question
    table("certainty", "the full vote's answer", "samples")
    for certainty in CERTAINTIES:
        row(certainty, f"{same[certainty] / count:.1%}", f"{samples[certainty] / count / given.width:.1%}")
    return {
        "questions": count,
        "searched for real": live,
        "same": {certainty: found / count for certainty, found in same.items()},
        "samples": {certainty: found / count / given.width for certainty, found in samples.items()},
    }


@bench.part(
    flag("--data", "", "file of prompts"),
    flag("--model", "", "folder, file or name; empty: the default one"),
    flag("--prompts", 40),
    flag("--width", 8, "answers"),
    flag("--tokens", 96, "most tokens of an answer"),
)
def best_of(given: Given) -> Found:
    """Halving at checkpoints against all answers to their end."""
    llm = LLM(given.model or None)
    params = SamplingParams(temperature=1.0, max_tokens=given.tokens, seed=1, logprobs=0)
    lines = Path(given.data).read_text().splitlines()[: given.prompts]
    among = tokens = full_tokens = 0
    for line in lines:
        messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
        halved = llm.search("best_of", messages, params, n=given.width)
        full = llm.search("best_of", messages, params, n=given.width, checkpoints=())
        best = [candidate.token_ids for candidate in full.candidates[:3]]
        among += halved.token_ids in best
        tokens, full_tokens = tokens + halved.num_generated, full_tokens + full.num_generated
    print(f"{among / len(lines):.0%} are of the best three, {tokens / full_tokens:.1%} of the tokens")
    return {"prompts": len(lines), "among_best_three": among / len(lines), "tokens": tokens / full_tokens}


if __name__ == "__main__":
    bench.main()
