"""Does the engine give what transformers gives, whatever happens around a request?

A `Scenario` says what happens: batch, chunks, blocks, cache, preemption, forks, loop, mode, and what computes. `play`
runs twenty prompts through it and compares every token and every logit that was computed with transformers' own greedy
decoding.

    python -m tests.torch.parity [--all] [--backend NAME] [--architecture NAME] [--sample N]
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, PreemptionCosts, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.events import StepEvents
from paceline.core.request import RequestId, RequestState
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import InvalidTransition
from paceline.factory import build_engine
from paceline.models.decoder import Decoder
from paceline.models.files.open import open_checkpoint
from paceline.models.load import build_decoder
from paceline.runner.cpu import CPURunner, StepCompute
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.kv_tensors import KVTensors
from paceline.runner.native.kv_pool import KVPool
from paceline.runner.native.model import NativeModel, build_model, objection
from paceline.runner.native.step import NativeStep
from paceline.runner.torch_step import TorchStep
from tests.bits import Between
from tests.kernels import host_code
from tests.torch.pairwise import Row, covering
from tests.torch.tiny_models import NAMES, VOCAB, save

EOS = 2
NUM_NEW = 12
NUM_PROMPTS = 20
NUM_ROWS = 32
LONGEST = 60
MAX_LEN = LONGEST + NUM_NEW
TOLERANCE = 1e-4
STRAY = 1e9  # what lies in blocks that were not written: large, and nothing when its weight is zero

Arrival = tuple[tuple[int, ...], "Reference | None"]
Index = NDArray[np.int64]
BACKENDS = ("torch", "native")
CHUNKS = ("budget 1", "budget 7", "budget 64", "share 1")
DISTURBANCES = ("none", "recompute", "swap", "auto", "pause", "aborts", "n=4", "fork")
FACTORS: dict[str, Sequence[Any]] = {
    "architecture": NAMES,
    "batch": ("alone", "together"),
    "chunk": CHUNKS,
    "block_size": (8, 16, 32),
    "caching": (True, False),
    "disturbance": DISTURBANCES,
    "depth": (0, 1, 2),
    "mode": ("continuous", "dynamic", "static"),
}
# The native kernels have no rotation that depends on the length of a sequence, and no blocks below 16 tokens.
NATIVE_NAMES = tuple(name for name in NAMES if name != "llama-dynamic")
NATIVE_FACTORS = FACTORS | {"architecture": NATIVE_NAMES, "block_size": (16, 32, 64)}
BY_BACKEND: Mapping[str, Mapping[str, Sequence[Any]]] = {"torch": FACTORS, "native": NATIVE_FACTORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens around the requests."""

    architecture: str
    batch: str = "together"  # or alone: one request at a time
    chunk: str = "budget 64"  # tokens of a step; "share 1": a prompt gets one while others wait
    block_size: int = 16
    caching: bool = True
    disturbance: str = "none"
    depth: int = 0
    mode: str = "continuous"
    backend: str = "torch"
    seed: int = 0  # of what is left to chance: which requests come when, are preempted, aborted or forked

    def __str__(self) -> str:
        cached = "cached" if self.caching else "uncached"
        parts = (self.batch, self.chunk, f"blocks of {self.block_size}", cached, self.disturbance)
        name = self.architecture if self.backend == "torch" else f"{self.backend} {self.architecture}"
        return f"{name}: {', '.join(parts)}, depth {self.depth}, {self.mode}, seed {self.seed}"


def is_allowed(row: Row) -> bool:
    """Combinations that mean something."""
    if row["batch"] == "alone" and row["disturbance"] == "aborts":
        return False  # no request is there to be aborted
    # With dynamic rope a token's keys depend on the length of its prompt: equal beginnings are not equal, and
    # a branch that reads its parent's output as its prompt is another request.
    return row["architecture"] != "llama-dynamic" or not (row["caching"] or row["disturbance"] == "fork")


def pairwise_scenarios(backend: str = "torch", seed: int = 0) -> list[Scenario]:
    """Scenarios in which every allowed pair of values occurs together on the backend."""
    return [Scenario(backend=backend, **row) for row in covering(BY_BACKEND[backend], is_allowed, seed=seed)]


# ---------------------------------------------------------------- the reference


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What transformers makes of one prompt, greedily, one token at a time."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    gaps: tuple[float, ...]  # between the two best logits of each output token
    logits: Tensor  # [prompt + output - 1, vocabulary]: after each token that was read

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.prompt + self.output


def greedy_reference(
    model: Any, prompt: Sequence[int], num_new: int, eos: Sequence[int] = (EOS,)
) -> Reference:
    read, past = torch.tensor([list(prompt)]), None
    output: list[int] = []
    gaps: list[float] = []
    logits: list[Tensor] = []
    with torch.inference_mode():
        while len(output) < num_new and not (output and output[-1] in eos):
            result = model(read, past_key_values=past, use_cache=True)
            past = result.past_key_values
            logits.append(result.logits[0].float())
            best = logits[-1][-1].topk(2)
            output.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            read = torch.tensor([[output[-1]]])
    return Reference(tuple(prompt), tuple(output), tuple(gaps), torch.cat(logits))


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model on both sides, and the prompts with their references."""

    decoder: Decoder
    native: NativeModel | None  # None: the native kernels do not compute it
    references: tuple[Reference, ...]
    neighbours: tuple[tuple[int, ...], ...]

    def make_step(self, backend: str, config: EngineConfig) -> StepCompute:
        """What computes the model's steps. Blocks hold numbers that are noticed where they are read unwritten."""
        if backend == "torch":
            step: StepCompute = TorchStep(self.decoder, config.kv)
        else:
            assert self.native is not None
            step = NativeStep(self.native, config, host_code(), threads=1)
        fill_blocks(step, STRAY)
        return step


def fill_blocks(step: StepCompute, value: float, first: int = 1) -> None:
    """Blocks as if another owner had left that in them; without the null block, which is the first of all."""
    if isinstance(step.kv, KVTensors):
        for pools in step.kv.layers:
            pools.keys[:, first:] = value
            pools.values[:, first:] = value
    else:
        assert isinstance(step.kv, KVPool)
        for pool in step.kv.layers:
            pool[first:] = value


def make_prompts(seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Prompts of all lengths; every other one shares its beginning with those like it, two are the same."""
    rng = random.Random(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCAB) for _ in range(count))

    shared = draw(40)
    prompts = []
    for index in range(NUM_ROWS):
        length = rng.randrange(2, LONGEST + 1)
        cut = min(rng.randrange(8, 41), length - 1) if index % 2 else 0
        prompts.append(shared[:cut] + draw(length - cut))
    prompts[5] = prompts[1]
    prompts[7] = shared[:32]  # whole blocks, whatever their size
    return tuple(prompts)


@cache
def subject(architecture: str) -> Subject:
    """The tiny model of an architecture and its references; made once."""
    with TemporaryDirectory() as folder:
        model = save(architecture, Path(folder))
        checkpoint = open_checkpoint(folder)
        decoder = build_decoder(checkpoint, MAX_LEN + 1)
        native = None if objection(checkpoint, 16) else build_model(checkpoint, MAX_LEN + 1)
    prompts = make_prompts()
    stateful = "dynamic" in architecture  # it remembers the longest sequence it has seen
    references = [
        greedy_reference(copy.deepcopy(model) if stateful else model, prompt, NUM_NEW)
        for prompt in prompts[:NUM_PROMPTS]
    ]
    return Subject(decoder, native, tuple(references), prompts[NUM_PROMPTS:])


# ---------------------------------------------------------------- the engine under test


class Tap(Between):
    """A way to compute steps, with the logits of every token compared where a reference knows them."""

    def __init__(self, compute: StepCompute, references: Sequence[Reference]) -> None:
        super().__init__(compute)
        self._references = {reference.prompt: reference for reference in references}
        self._sequences = [np.array(reference.sequence) for reference in references]
        self._ordered = list(references)
        self.worst = 0.0
        self.compared = 0

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        good = self._compute.forward(rows, batch, due)
        self._compare(rows, batch, self._compute.logits(np.arange(len(batch.tokens))))
        return good

    def _compare(self, rows: DeviceRows, batch: FlatBatch, logits: NDArray[np.float32]) -> None:
        end = 0
        for index, row in enumerate(batch.rows.tolist()):
            start, end = end, end + int(batch.count[index])
            last = int(batch.start[index] + batch.count[index])
            reference = self._reference(rows, row, last)
            if reference is not None and not batch.masked[index]:
                expected = reference.logits[last - (end - start) : last].numpy()
                self.worst = max(self.worst, float(np.abs(logits[start:end] - expected).max()))
                self.compared += end - start

    def _reference(self, rows: DeviceRows, row: int, count: int) -> Reference | None:
        """The reference that reads a row's first tokens and has something to say after each of them."""
        tokens, prompt = rows.tokens[row, :count], rows.tokens[row, : rows.num_prompt[row]]
        found = self._references.get(tuple(prompt.tolist()))
        if found is not None and found.sequence[: len(tokens)] == tuple(tokens.tolist()):
            return found
        for reference, sequence in zip(self._ordered, self._sequences, strict=True):  # a branch
            size = max(len(prompt), len(tokens))
            if size < len(sequence) and np.array_equal(sequence[:size], rows.tokens[row, :size]):
                return reference
        return None


def engine_config(scenario: Scenario, windows: Sequence[int | None]) -> EngineConfig:
    """Blocks for about half the rows at their full length: nearly every block is used again."""
    size = scenario.block_size
    kind, number = scenario.chunk.split()
    budget = int(number) if kind == "budget" else 40
    return EngineConfig(
        kv=KVConfig(
            block_size=size,
            num_blocks=1 + NUM_ROWS * MAX_LEN // 2 // size,
            num_host_blocks=NUM_ROWS * MAX_LEN // 2 // size,
            enable_prefix_caching=scenario.caching,
            groups=tuple(GroupSpec(window=window) for window in windows),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=budget,
            long_prefill_share=0.5 if kind == "budget" else 0.025,
            max_model_len=MAX_LEN,
            mode=scenario.mode,
            batch_size=min(10, budget),  # a padded batch larger than a step gets nowhere
            max_preemptions=0,  # no request is protected
            preemption=scenario.disturbance if scenario.disturbance in ("swap", "recompute") else "auto",
            # What is short is computed again, what is long goes to the host.
            preemption_costs=PreemptionCosts(token_s=0.0, product_s=1e-3, block_s=0.05),
        ),
        depth=scenario.depth,
        check_every=0,
    )


@dataclass(slots=True)
class ObservedSequence:
    """One sequence as the client sees it."""

    reference: Reference | None  # None: a neighbour
    skip: int = 0  # tokens of the reference's output that were there before it began
    tokens: list[int] = field(default_factory=list)
    ended: str = ""

    @property
    def agrees(self) -> bool:
        """So far, word for word."""
        assert self.reference is not None
        return tuple(self.tokens) == self.reference.output[self.skip : self.skip + len(self.tokens)]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run gave."""

    sequences: list[ObservedSequence]
    worst: float  # largest difference of a logit
    compared: int  # tokens whose logits were compared
    counts: Counter[str]
    wrong: list[str] = field(default_factory=list)
    ties: int = 0  # first differences where the reference itself was undecided

    def check(self) -> None:
        assert not self.wrong, "; ".join(self.wrong[:4])
        assert self.compared > 0 and self.worst < TOLERANCE, f"logits differ by {self.worst:.2e}"


class Play:
    """One scenario under way; `change` stands between what computes and the comparison of its logits."""

    def __init__(
        self,
        scenario: Scenario,
        subject: Subject,
        *,
        quick: bool = False,
        change: Callable[[StepCompute], StepCompute] | None = None,
        compares_logits: bool = True,
    ) -> None:
        self.scenario = scenario
        self.config = engine_config(scenario, subject.decoder.spec.group_windows)
        self._step_compute = subject.make_step(scenario.backend, self.config)
        changed = self._step_compute if change is None else change(self._step_compute)
        self._tap = Tap(changed, subject.references)
        self.clock = ManualClock()
        runner = CPURunner(self.config, self._tap if compares_logits else changed)
        self.engine: Engine = build_engine(self.config, runner, clock=self.clock)
        self.sequences: dict[RequestId, ObservedSequence] = {}
        self.counts: Counter[str] = Counter()
        self._subject = subject
        self._quick = quick and scenario.chunk in ("budget 1", "budget 7")  # many steps
        self._rng = random.Random(str(scenario))
        # Computing everything again after every token is cheap only where a step takes many tokens.
        cheap_swap = scenario.disturbance == "swap" and scenario.mode == "continuous"
        large_steps = scenario.batch == "together" and scenario.chunk in ("budget 64", "share 1")
        self._often = cheap_swap or large_steps
        self._rate = (1 if scenario.chunk == "budget 1" else 3) / NUM_NEW

    def run(self) -> Outcome:
        try:
            self._run_all()
        finally:
            if isinstance(self._step_compute, NativeStep):
                self._step_compute.close()
        outcome = Outcome(
            sequences=list(self.sequences.values()),
            worst=self._tap.worst,
            compared=self._tap.compared,
            counts=self.counts,
        )
        _judge(outcome, self.scenario)
        return outcome

    def _run_all(self) -> None:
        for arrivals in self._arrivals():
            for prompt, reference in arrivals:
                self._add(prompt, reference)
            for _ in range(2):
                self._step()
            while self.scenario.batch == "alone" and self.engine.has_requests:
                self._step()
        while self.engine.has_requests:
            self._step()

    def _arrivals(self) -> Iterator[list[Arrival]]:
        """Which requests come when: one by one, or a first dozen and the rest a few at a time."""
        references = self._subject.references[:: 3 if self._quick else 1]
        own: list[Arrival] = [(reference.prompt, reference) for reference in references]
        if self.scenario.batch == "alone":
            yield from ([entry] for entry in own)
            return
        requests = [
            *own,
            *((prompt, None) for prompt in self._subject.neighbours[:: 3 if self._quick else 1]),
        ]
        self._rng.shuffle(requests)
        yield requests[:12]
        for start in range(12, len(requests), 4):
            yield requests[start : start + 4]

    def _add(self, prompt: tuple[int, ...], reference: Reference | None) -> None:
        branching = self.scenario.disturbance == "n=4" and reference is not None
        many = 4 if branching and (not self.counts["n=4"] or self._rng.random() < 0.3) else 1
        sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, n=many)
        for request in self.engine.add(prompt, sampling):
            self.sequences[request] = ObservedSequence(reference)
        self.counts["n=4"] += many > 1

    def _step(self) -> None:
        self.clock.advance(1.0)
        self.counts["steps"] += 1
        assert self.counts["steps"] < 20_000, "the run does not end"
        events = self.engine.step_overlapped() if self.scenario.depth else self.engine.step()
        self._hear(events)
        self._look_for_errors()
        self._disturb(events)

    def _look_for_errors(self) -> None:
        if self.engine.last_error is not None:
            raise self.engine.last_error

    def _hear(self, events: StepEvents) -> None:
        for batch in events.tokens:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                self.sequences[RequestId(request)].tokens.append(token)
        for finished in events.finished:
            self.sequences[finished.request].ended = finished.detail or finished.reason.value

    # -- what happens between two steps --------------------------------------------------------------------

    def _disturb(self, events: StepEvents) -> None:
        match self.scenario.disturbance:
            case "recompute" | "swap" | "auto" | "pause":
                self._preempt(events)
            case "aborts":
                self._abort()
            case "fork":
                self._fork()

    def _preempt(self, events: StepEvents) -> None:
        """A row that has just got a token is preempted: each step undoes what it can and still gains a token."""
        swap = {"recompute": False, "swap": True}.get(self.scenario.disturbance)
        state = self.engine.scheduler.state
        for batch in events.tokens:
            for number in batch.requests.tolist():
                request = state.requests.get(number)
                if request is not None and (self._often or self._rng.random() < self._rate):
                    self.counts["preempted"] += self._preempt_one(number, swap)
        for request in list(state.prefilling.values()):  # and now and then one in the middle of its prompt
            if request.preemptions < 3 and self._rng.random() < (0.1 if self._often else 0.01):
                self.counts["preempted early"] += self._preempt_one(request.id, swap)

    def _preempt_one(self, number: RequestId, swap: bool | None) -> bool:
        """Preempted, or paused and let go on at once."""
        scheduler = self.engine.scheduler
        if self.scenario.disturbance != "pause":
            return scheduler.preempt(number, swap=swap)
        try:
            scheduler.pause(number)
        except InvalidTransition:  # it only waits for its batch to leave
            return False
        scheduler.resume(number)
        return True

    def _abort(self) -> None:
        live = [
            request
            for request, sequence in self.sequences.items()
            if sequence.reference is None and not sequence.ended
        ]
        if live and self._rng.random() < 0.3:
            self.counts["aborted"] += self.engine.abort(self._rng.choice(live))

    def _fork(self) -> None:
        """Branches of requests under way, at whatever they have delivered."""
        state = self.engine.scheduler.state
        for request, sequence in list(self.sequences.items()):
            if sequence.reference is None or sequence.skip or not sequence.tokens or not sequence.agrees:
                continue
            if len(sequence.tokens) == len(sequence.reference.output):
                continue  # it has ended, or waits for its batch to end
            if state.requests[request].state is RequestState.RUNNING and self._rng.random() < 0.08:
                for branch in self.engine.fork(request, 2):
                    self.sequences[branch] = ObservedSequence(sequence.reference, skip=len(sequence.tokens))
                    self.counts["forked"] += 1


def play(scenario: Scenario, *, quick: bool = False) -> Outcome:
    """Run a scenario; `quick` takes a third of the prompts where a step computes few tokens."""
    return Play(scenario, subject(scenario.architecture), quick=quick).run()


def _judge(outcome: Outcome, scenario: Scenario) -> None:
    """Compare the sequences with the references; a near tie of the reference's is no mistake."""
    for sequence in outcome.sequences:
        if sequence.reference is None:
            continue
        wanted, gaps = sequence.reference.output[sequence.skip :], sequence.reference.gaps[sequence.skip :]
        if sequence.ended not in ("stop", "length"):
            outcome.wrong.append(f"{scenario}: a request ended with {sequence.ended!r}")
        elif tuple(sequence.tokens) != wanted:
            pairs = zip(sequence.tokens, wanted, strict=False)
            first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), -1)
            if first >= 0 and gaps[first] < TOLERANCE:
                outcome.ties += 1
            else:
                outcome.wrong.append(f"{scenario}: token {first} of {list(wanted)}, got {sequence.tokens}")


if __name__ == "__main__":
    from tests.torch.parity_table import main

    main()
