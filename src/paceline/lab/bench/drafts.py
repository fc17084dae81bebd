"""What drafts bring: the same questions without and with them, in turns, in one process; and a log of requests.

Questions are answered by two engines that take as many requests at a time as there are clients. They compute for a
quarter of a second each: what other programs take from the machine, they take from both. On a CPU both make the same
tokens, which is checked; on a GPU it is counted how many answers are the same, and speeds are those of a token. A log
is said again without a model: what it would have got in a step is counted, every draft verified.
"""

from __future__ import annotations

import json
import statistics
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from paceline.config.speculative import MOST_DRAFTS, DraftConfig
from paceline.core.events import TokenEvents
from paceline.core.plan import StepPlan
from paceline.core.sampling import SamplingParams
from paceline.errors import EngineFailed, InputError
from paceline.llm.llm import LLM
from paceline.llm.prompts import ChatPrompts
from paceline.runner.device import choose_device
from paceline.runner.device_rows import DeviceRows
from paceline.runner.drafts import History, NgramDrafter
from paceline.scheduler.draft_budget import DraftBudget

MOST_CHARACTERS = 6000  # of a question
ALL = "all"
PROMPT_TOKENS = 4  # of a request whose answer is known
GPU_BLOCK = 64  # tokens
GPU_KV_BYTES = 4 << 30  # of an engine, where it is not said
TURN_S = 0.25  # that a side computes before it is the other's turn


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsResult:
    """Questions of one category with some number of clients. Of all categories together, only the ratio is known."""

    clients: int
    category: str
    ratio: float  # speed with drafts over speed without, the median of pairs of runs
    plain_tokens_per_s: float | None = None  # prompts included
    drafted_tokens_per_s: float | None = None
    tokens_per_step: float | None = None  # of a row
    verified_per_token: float | None = None
    right: float | None = None  # share of the drafts that were verified
    same: float | None = None  # share of the answers that are the same with drafts as without


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResult:
    """A log that was said again."""

    method: str
    num_requests: int
    tokens_per_step: float
    verified_per_token: float


def read_questions(path: Path) -> dict[str, list[str]]:
    """First turns by category: a JSON object a line with `category` and `turns`, as Spec-Bench has them."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(_lines(path), 1):
        try:
            question = json.loads(line)
            category, first = str(question["category"]), str(question["turns"][0])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{path}: line {number} is no question with category and turns") from error
        found.setdefault(category, []).append(first)
    if not found:
        raise InputError(f"{path}: there is no question in it")
    return found


def read_script(path: Path, most: int) -> list[tuple[str, str]]:
    """Prompts and answers of the first requests of a log: a JSON object a line with `timestamp`, `input` and `output`,
    in a file, in the files *.jsonl of a folder, or in those of a tar archive."""
    requests: list[tuple[float, str, str]] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            entry = json.loads(line)
            requests.append((float(entry["timestamp"]), str(entry["input"]), str(entry["output"])))
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{path}: line {number} has no timestamp, input and output") from error
    if not requests:
        raise InputError(f"{path}: there is no request in it")
    return [(prompt, answer) for _, prompt, answer in sorted(requests)[:most]]


def _lines(path: Path) -> list[str]:
    try:
        if path.is_dir():
            texts = [each.read_text(encoding="utf-8") for each in sorted(path.glob("*.jsonl"))]
        elif path.name.endswith((".tar", ".tar.gz", ".tgz")):
            texts = list(_archived(path))
        else:
            texts = [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError, tarfile.TarError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    return [line for text in texts for line in text.splitlines() if line.strip()]


def _archived(path: Path) -> Iterator[str]:
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            file = archive.extractfile(member) if member.name.endswith(".jsonl") else None
            if file is not None:
                yield file.read().decode("utf-8")


class Side:
    """An engine, and what it has answered."""

    def __init__(
        self, engine: Mapping[str, Any], clients: int, method: str, sampling: SamplingParams
    ) -> None:
        given = {"enable_prefix_caching": False, **engine}
        if choose_device(ModelConfig(device=engine.get("device", "auto"))) == "cuda":
            given.setdefault("kv_cache_memory_bytes", GPU_KV_BYTES)  # there are two of them on one GPU
        self.llm = LLM(**{**given, "max_num_seqs": clients, "speculative_config": method})
        self._engine = self.llm.loaded.engine
        self._prompts = ChatPrompts(self.llm.loaded.tokenizer)
        self._sampling = sampling
        self._batches: list[TokenEvents] = []  # of the questions that were begun last

    def begin(self, questions: Sequence[str]) -> None:
        """Take the questions; none is computed yet."""
        self.llm.reset_prefix_cache()  # the answers of the round before would be drafted whole
        self._batches = []
        for text in questions:
            chat = [{"role": "user", "content": text[:MOST_CHARACTERS]}]
            self._engine.add(self._prompts.render(chat)[1], self._sampling)

    @property
    def is_busy(self) -> bool:
        return self._engine.has_requests or not self._engine.is_idle

    def work(self, seconds: float) -> float:
        """Compute steps for about so long, or until all is answered; the seconds it took."""
        step = self._engine.step_overlapped if self._engine.depth else self._engine.step
        started_s = time.perf_counter()
        while self.is_busy and time.perf_counter() - started_s < seconds:
            self._batches += step().tokens
        return time.perf_counter() - started_s

    @property
    def tokens(self) -> list[list[int]]:
        """The answers, in the order of the questions."""
        found: dict[int, list[int]] = {}
        for batch in self._batches:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found.setdefault(request, []).append(token)
        return [found[request] for request in sorted(found)]

    @property
    def is_exact(self) -> bool:
        """Whether a token never hangs on the size of a step; on a GPU roundings do."""
        return self.llm.loaded.hardware.device == "cpu"

    def counts(self) -> tuple[int, int, int]:
        """Drafts verified, those that were right, and rows that were sampled."""
        counters = self._engine.scheduler.state.counters
        return counters.draft_tokens, counters.accepted_tokens, counters.logit_rows


def answer_in_turns(sides: Sequence[Side], questions: Sequence[str]) -> list[float]:
    """All sides answer the questions; the seconds of each."""
    for side in sides:
        side.begin(questions)
    seconds = [0.0] * len(sides)
    while any(side.is_busy for side in sides):
        for number, side in enumerate(sides):
            seconds[number] += side.work(TURN_S)
    return seconds


def compare_sides(
    plain: Side, drafted: Side, clients: int, by_category: Mapping[str, Sequence[str]], rounds: int
) -> Iterator[DraftsResult]:
    """Answer the questions of each category in turns; at the end, all categories together."""
    ratios = []
    for category, questions in by_category.items():
        before = drafted.counts()
        pairs = [answer_in_turns((plain, drafted), questions) for _ in range(rounds)]
        answers = plain.tokens, drafted.tokens
        same = [one == other for one, other in zip(*answers, strict=True)]
        if plain.is_exact and not all(same):
            raise EngineFailed(f"{category}: the engine made other tokens with drafts than without")
        verified, right, rows = (now - then for now, then in zip(drafted.counts(), before, strict=True))
        plain_total, total = (sum(map(len, made)) for made in answers)
        ratios.append(statistics.median(without / with_ for without, with_ in pairs) * total / plain_total)
        yield DraftsResult(
            clients=clients,
            category=category,
            ratio=ratios[-1],
            plain_tokens_per_s=plain_total / statistics.median(without for without, _ in pairs),
            drafted_tokens_per_s=total / statistics.median(with_ for _, with_ in pairs),
            tokens_per_step=total * rounds / rows,
            verified_per_token=verified / (total * rounds),
            right=right / max(verified, 1),
            same=sum(same) / len(same),
        )
    yield DraftsResult(clients=clients, category=ALL, ratio=statistics.geometric_mean(ratios))


class OracleSide:
    """An engine with made-up weights, and requests whose answers hang on nothing but their seeds."""

    def __init__(self, engine: Mapping[str, Any], rows: int, tokens: int, method: str) -> None:
        longest = PROMPT_TOKENS + tokens + MOST_DRAFTS
        sizes = {"max_num_seqs": rows, "max_model_len": longest, "enable_prefix_caching": False}
        blocks = rows * -(-longest // GPU_BLOCK) + rows + 8
        self.llm = LLM(**{**engine, **sizes, "num_blocks": blocks, "speculative_config": method})
        self._tokens = tokens
        self.tokens: list[list[int]] = []

    def answer(self, rows: int, told: Sequence[Sequence[int]] | None) -> float:
        """Tokens per second while this many requests decode, each with the answer it is going to give, where that is
        known: from the first token of the last one on, until the first one ends."""
        engine, begun, counted, begun_s, ended_s = self.llm.loaded.engine, 0, 0, 0.0, 0.0
        for row in range(rows):
            prediction = () if told is None else tuple(told[row])
            params = _DrawnByNoise(max_tokens=self._tokens, seed=row, ignore_eos=True, prediction=prediction)
            engine.add([5 + row % 100, 7, 11, 13], params)
        batches: list[TokenEvents] = []
        while engine.has_requests or not engine.is_idle:
            events = engine.step_overlapped()
            batches += events.tokens
            if begun < rows:
                begun += sum(int((batch.index == 0).sum()) for batch in events.tokens)
                begun_s = time.perf_counter()
            elif not ended_s:
                counted += sum(len(batch.tokens) for batch in events.tokens)
                ended_s = time.perf_counter() if events.finished else 0.0
        requests = np.concatenate([batch.requests for batch in batches])
        tokens = np.concatenate([batch.tokens for batch in batches])
        order = np.argsort(requests, kind="stable")  # tokens of a request come in their order
        self.tokens = tokens[order].reshape(rows, self._tokens).tolist()
        return counted / (ended_s - begun_s)

    def counts(self) -> tuple[int, int, int]:
        counters = self.llm.loaded.engine.scheduler.state.counters
        return counters.draft_tokens, counters.accepted_tokens, counters.logit_rows


class _DrawnByNoise(SamplingParams):
    """A request whose tokens are drawn by noise alone, since its temperature is beyond what a request may have: random
    weights have no favourites, and a rounding of their logits would end what is known of the answer."""

    __slots__ = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", 1.0)
        super().__post_init__()
        object.__setattr__(self, "temperature", 1e30)


def compare_oracle(
    plain: OracleSide, drafted: OracleSide, rows: int, acceptance: float, rounds: int
) -> DraftsResult:
    """The same requests without and with drafts, in turns."""
    plain.answer(rows, None)
    answers = plain.tokens
    drafted.answer(rows, answers)  # learns what drafts bring at this number of rows
    before, pairs = drafted.counts(), []
    for _ in range(rounds):
        pairs.append((plain.answer(rows, None), drafted.answer(rows, answers)))
        if not plain.tokens == drafted.tokens == answers:
            raise EngineFailed(f"{rows} rows: the engine made other tokens with drafts than without")
    verified, right, sampled = (now - then for now, then in zip(drafted.counts(), before, strict=True))
    total = sum(map(len, answers))
    return DraftsResult(
        clients=rows,
        category=f"oracle {acceptance:g}",
        ratio=statistics.median(with_ / without for without, with_ in pairs),
        plain_tokens_per_s=statistics.median(without for without, _ in pairs),
        drafted_tokens_per_s=statistics.median(with_ for _, with_ in pairs),
        tokens_per_step=total * rounds / max(sampled, 1),
        verified_per_token=verified / (total * rounds),
        right=right / max(verified, 1),
    )


def say(method: str, texts: Sequence[tuple[list[int], list[int]]], width: int) -> ScriptResult:
    """Tokens per step if a row said what a log says, every draft verified; no model computes."""
    longest = max(len(prompt) + len(answer) for prompt, answer in texts) + width + 1
    scheduler = SchedulerConfig(max_num_seqs=1, max_model_len=longest)
    rows = DeviceRows(EngineConfig(scheduler=scheduler, depth=0))
    drafter = NgramDrafter(History() if method == "history" else None)
    budget, only = DraftBudget(DraftConfig(), width), np.array([0])
    steps = tokens = verified = 0
    for prompt, answer in texts:
        rows.tokens[0, : len(prompt)] = prompt
        rows.num_tokens[0], rows.limit[0], rows.ended[0], rows.texts[0] = len(prompt), longest, False, 1
        rows.num_prompt[0] = len(prompt)
        drafter.join(rows, 0)
        said = 0
        while said < len(answer):
            plan = StepPlan(seq=1, draft_width=width, draft_tokens=width, trust=budget.tell_trust())
            made = drafter.propose(rows, plan, only) if said else None
            guess = [] if made is None else made.tokens[0, : made.number[0]].tolist()
            right = _agreed(guess, answer[said:])
            new = answer[said : said + right + 1]
            end = int(rows.num_tokens[0]) + len(new)
            rows.tokens[0, end - len(new) : end], rows.num_tokens[0] = new, end
            drafter.observe(rows, only, np.array([len(new)]), np.array([len(guess)]))
            budget.learn_drafts(drafter.take_tally())
            said, steps, verified = said + len(new), steps + 1, verified + len(guess)
        rows.ended[0] = True
        drafter.leave(rows, 0)
        tokens += len(answer)
    return ScriptResult(
        method=method,
        num_requests=len(texts),
        tokens_per_step=tokens / max(steps, 1),
        verified_per_token=verified / max(tokens, 1),
    )


def _agreed(guess: Sequence[int], answer: Iterable[int]) -> int:
    """How many of the guesses are what was said."""
    found = 0
    for one, other in zip(guess, answer, strict=False):
        if one != other:
            break
        found += 1
    return found
