"""Whether texts can be placed in prompts of a model, and how much of its answers that keeps.

Each prompt is computed whole, with its passages left out, and with passages that were computed alone and placed; the
distributions of the next tokens are compared over the greedy answer to the whole prompt. All of it by plans, as an
engine makes them, so that what is measured is what is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, ModelConfig, SchedulerConfig
from paceline.core.blend_quality import Blending, PassagePrompt
from paceline.core.plan import (
    EMPTY,
    BlockAppends,
    Placements,
    RowJoins,
    RowSet,
    RowSpans,
    StepPlan,
    StepResult,
    i32,
    whole_rows,
)
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import RECOMPUTED
from paceline.models.spec import ModelSpec
from paceline.runner.cpu import CPURunner, StepCompute

if TYPE_CHECKING:
    from paceline.text.passages import PassageQuestion
    from paceline.text.tokenizer import Tokenizer

Floats = NDArray[np.float64]
MakeStep = Callable[[EngineConfig], StepCompute]
OnPrompt = Callable[[int, int], None]  # how many are done, and of how many
ANSWER = 12  # tokens that are compared
MOST_AT_START = 800  # tokens of a prompt of our own
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)


def blend_objection(spec: ModelSpec, model: ModelConfig, config: EngineConfig, *, on_gpu: bool) -> str:
    """Why no texts are placed, in words; empty where they can be."""
    drafts = config.scheduler.drafts
    if spec.encoder is not None:
        return "this model generates no text"
    if model.kv_cache_dtype in ("fp8", "int8"):
        return f"keys of --kv-cache-dtype {model.kv_cache_dtype} are rounded and cannot be turned exactly"
    if any(rope.kind == "dynamic" for rope in spec.ropes):
        return "this model's rotary positions depend on the length of a sequence (dynamic), so keys cannot be moved"
    if spec.group_windows != (None,):
        return "this model has layers with a sliding window"
    if drafts is not None and drafts.model:
        return "a model that drafts reads all tokens of a prompt, and of placed texts there is only KV"
    if not config.kv.enable_prefix_caching or config.scheduler.mode != "continuous":
        return "placed texts need prefix caching and --mode continuous"
    return "texts are placed on a CPU only so far" if on_gpu else ""


def blending_of(
    spec: ModelSpec,
    model: ModelConfig,
    config: EngineConfig,
    make_step: MakeStep | None,
    tokenizer: Tokenizer | None,
    asked: Sequence[PassageQuestion] = (),
    on_prompt: OnPrompt = lambda done, of: None,
) -> Blending:
    """Of a loaded model. Measured on what is asked, or on a few prompts of our own where the model is to be offered;
    `make_step`: on a CPU."""
    objection = blend_objection(spec, model, config, on_gpu=make_step is None)
    if objection or make_step is None or not (asked or model.context_reuse == "blend"):
        return Blending(objection=objection)
    if tokenizer is None:
        return Blending(objection="without a tokenizer, what blending keeps cannot be measured")
    from paceline.text.passages import SMALL, built_in, passage_prompts

    longest = min(spec.max_positions, config.scheduler.max_model_len) - ANSWER - 1
    if not asked:  # a start waits for it
        longest = min(longest, MOST_AT_START)
    return measure_blending(
        make_step, passage_prompts(tokenizer, asked or built_in(SMALL), longest), on_prompt
    )


def measure_blending(
    make_step: MakeStep, prompts: Sequence[PassagePrompt], on_prompt: OnPrompt = lambda done, of: None
) -> Blending:
    """What placing keeps of these prompts. Each is computed about two and a half times."""
    longest = max(sum(len(part.tokens) for part in prompt) for prompt in prompts)
    passages = max(sum(part.is_placed for part in prompt) for prompt in prompts)
    bench = _Bench(make_step, passages + 3, longest + ANSWER + 1)
    try:
        found = []
        for done, prompt in enumerate(prompts):
            on_prompt(done, len(prompts))
            found.append(bench.compare(prompt))
    finally:
        bench.runner.close()
    divergence, left_out, agreement = (float(np.mean(column)) for column in zip(*found, strict=True))
    return Blending(
        kept=1 - divergence / left_out if left_out > 0 else 0.0,
        agreement=agreement,
        divergence=divergence,
        left_out=left_out,
        num_prompts=len(prompts),
    )


class _Bench:
    """A runner of a few rows, each with blocks of its own."""

    def __init__(self, make_step: MakeStep, num_rows: int, longest: int) -> None:
        self._per_row = math.ceil(longest / BLOCK_SIZE) + 1
        blocks = KVConfig(
            block_size=BLOCK_SIZE, num_blocks=num_rows * self._per_row + 1, groups=(GroupSpec(),)
        )
        scheduler = SchedulerConfig(
            max_num_seqs=num_rows, max_num_batched_tokens=num_rows * longest, max_model_len=longest
        )
        config = EngineConfig(kv=blocks, scheduler=scheduler, depth=0)
        self._step = make_step(config)
        self.runner = CPURunner(config, self._step)
        self._seq = 0

    def compare(self, prompt: PassagePrompt) -> tuple[float, float, float]:
        """KL of the placed prompt, KL without its passages, and how often the placed one has the same top token."""
        whole = [token for part in prompt for token in part.tokens]
        answer, exact = self._answer(whole)
        rest = [token for part in prompt if not part.is_placed for token in part.tokens]
        modules = [list(part.tokens) for part in prompt if part.is_placed]
        self._run([*modules, rest + answer], first_row=1)
        without = self._last()
        blended = self._placed(prompt, whole + answer, row=len(modules) + 2)
        same = float(np.mean(exact.argmax(axis=1) == blended.argmax(axis=1)))
        return _divergence(exact, blended), _divergence(exact, without), same

    def _answer(self, tokens: list[int]) -> tuple[list[int], Floats]:
        """The greedy answer but its last token, and the distributions it was drawn from."""
        result = self._run([tokens])
        found, answer = [self._logits(np.array([len(tokens) - 1]))], [int(result.tokens[0, 0])]
        for number in range(ANSWER - 1):
            change = RowSet(added=i32([0])) if not number else RowSet()
            result = self._submit(StepPlan(self._next(), decode_rows=change))
            answer.append(int(result.tokens[0, 0]))
            found.append(self._logits(np.array([0])))
        self._submit(StepPlan(self._next(), decode_rows=RowSet(removed=i32([0]))))
        return answer[:-1], np.concatenate(found)

    def _run(self, sequences: Sequence[list[int]], first_row: int = 0) -> StepResult:
        """Rows that compute these sequences whole."""
        rows = range(first_row, first_row + len(sequences))
        spans = RowSpans(row=i32(rows), num_scheduled=i32(map(len, sequences)))
        self._num_tokens = sum(map(len, sequences))
        return self._submit(
            StepPlan(
                self._next(), joins=self._joins(rows, sequences), spans=spans, new_blocks=self._blocks(rows)
            )
        )

    def _placed(self, prompt: PassagePrompt, tokens: list[int], row: int) -> Floats:
        """The prompt with its passages placed out of the rows that have computed them, 1 and those behind it."""
        spans: list[tuple[int, int]] = []  # start, count
        runs: list[tuple[int, int, int, int]] = []  # start, count, shift, first block
        done = at = 0
        module = 0
        for part in prompt:
            end = at + len(part.tokens)
            if part.is_placed:
                module += 1
                begin, stop = at + RECOMPUTED, at + len(part.tokens) // BLOCK_SIZE * BLOCK_SIZE
                if stop > begin:
                    spans.append((done, begin - done))
                    runs.append((begin, stop - begin, at, module * self._per_row + 1))
                    done = stop
            at = end
        spans.append((done, len(tokens) - done))
        start, count, shift, block = (
            (i32(column) for column in zip(*runs, strict=True)) if runs else (EMPTY,) * 4
        )
        per_run = [-(-(RECOMPUTED + number) // BLOCK_SIZE) for number in count.tolist()]
        blocks = [np.arange(first, first + many) for first, many in zip(block.tolist(), per_run, strict=True)]
        placements = Placements(
            row=i32([row] * len(runs)),
            group=i32([0] * len(runs)),
            start=start,
            count=count,
            shift=shift,
            first=i32([RECOMPUTED] * len(runs)),
            offset=i32(np.cumsum(per_run) - per_run),
            blocks=i32(number for each in blocks for number in each.tolist()),
        )
        starts, counts = zip(*spans, strict=True)
        self._num_tokens = sum(counts)
        self._submit(
            StepPlan(
                self._next(),
                joins=self._joins(range(row, row + 1), [tokens]),
                spans=RowSpans(row=i32([row] * len(spans)), num_scheduled=i32(counts), start=i32(starts)),
                new_blocks=self._blocks(range(row, row + 1)),
                placements=placements,
            )
        )
        return self._last()

    def _joins(self, rows: range, sequences: Sequence[list[int]]) -> RowJoins:
        limits = [len(tokens) + ANSWER for tokens in sequences]
        return whole_rows(rows, sequences, limits, GREEDY, generation=self._seq)

    def _blocks(self, rows: range) -> BlockAppends:
        row = np.repeat(np.arange(rows.start, rows.stop), self._per_row)
        index = np.tile(np.arange(self._per_row), len(rows))
        return BlockAppends(
            row=row.astype(np.int32),
            group=np.zeros(len(row), np.int32),
            index=index.astype(np.int32),
            block=(1 + row * self._per_row + index).astype(np.int32),
        )

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _submit(self, plan: StepPlan) -> StepResult:
        return self.runner.submit(plan).wait()

    def _last(self) -> Floats:
        """Logits of the last tokens of the step, as many as are compared."""
        return self._logits(np.arange(self._num_tokens - ANSWER, self._num_tokens))

    def _logits(self, tokens: NDArray[np.int64]) -> Floats:
        return self._step.logits(tokens).astype(np.float64)


def _divergence(exact: Floats, other: Floats) -> float:
    """KL of the other distributions from the exact ones, the mean over tokens, in nats."""
    p, q = _log_shares(exact), _log_shares(other)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def _log_shares(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found
