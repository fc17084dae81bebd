"""Draft heads and draft models on the GPU's runner through Triton's interpreter: tokens are those without drafts, and
guesses those of the same head or model on the CPU, which has the same state of every row then.

A tiny model in float32 and random guessers. Rows draw at a high temperature, so that their noise, which a guesser has
too, makes some drafts right; prompts come in chunks, rows share steps, fork and find their beginnings in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.config.sized import Capacity
from paceline.config.speculative import DraftConfig
from paceline.core.counters import Counters
from paceline.core.plan import StepPlan
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.draft_head import DraftModel, DraftNet, build_head
from paceline.models.files.head_folder import HeadFiles
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.load import build_decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.device_rows import DeviceRows, Drafts
from paceline.runner.gpu.drafts.device_head import DeviceDraftModel, DeviceGuesser, DraftParts
from paceline.runner.gpu.kernels.draft_layout import Proposals
from paceline.runner.model_drafts import Index, ModelDrafter
from paceline.runner.torch_step import TorchStep
from paceline.scheduler.invariants import InvariantChecker
from tests.guides import ScriptedMaker, structure
from tests.torch.test_gpu_drafts_interpreted import finish
from tests.torch.test_gpu_runner_interpreted import CONFIG, QuickRunner, SameWeights
from tests.torch.test_model_drafts import Silent, random_head

WIDTH = 3
VOCABULARY, KNOWN = 64, 48  # tokens, and those that heads guess
# By the seed of a row, or 0 if it draws none, and its tokens.
Guessed = dict[tuple[int, ...], tuple[int, ...]]


def params(**given: object) -> SamplingParams:
    whole = {"max_tokens": 6, "temperature": 2.0, "ignore_eos": True}
    return SamplingParams(**{**whole, **given})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(
        json.dumps({**CONFIG, "num_hidden_layers": 2, "vocab_size": VOCABULARY})
    )
    return path


def head_for(folder: Path, kind: str) -> HeadFiles:
    """With logits that leave much to the noise."""
    files = random_head(kind, open_checkpoint(folder, load_format="dummy").spec, draft_vocab=KNOWN)
    outputs = [name for name in files.tensors if name == "lm_head.weight" or name.endswith(".1.weight")]
    weaker = {name: files.tensors[name] * np.float32(0.3) for name in outputs}
    return replace(files, tensors={**files.tensors, **weaker})


def draft_model_for(folder: Path) -> Checkpoint:
    """Of another architecture, with another number and size of KV heads."""
    folder.mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    more = {**kind, "num_key_value_heads": 1, "tie_word_embeddings": False, "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes, **more}))
    return open_checkpoint(folder, load_format="dummy")


class Guessing:
    """An engine, and what was guessed in it."""

    def __init__(
        self, folder: Path, head: HeadFiles | Checkpoint | None, *, on_gpu: bool, depth: int, **kv: object
    ) -> None:
        checkpoint = open_checkpoint(folder, load_format="dummy")
        kind = head.spec.kind if isinstance(head, HeadFiles) else "draft_model"
        drafts = None if head is None else DraftConfig(method=kind, model="head", width=WIDTH)
        scheduler = SchedulerConfig(
            max_num_seqs=3, max_num_batched_tokens=48, max_model_len=256, drafts=drafts
        )
        kv_config = KVConfig(**{"block_size": 64, "num_blocks": 24, "groups": (GroupSpec(),), **kv})  # type: ignore[arg-type]
        config = EngineConfig(kv=kv_config, scheduler=scheduler, depth=depth)
        self.guessed: Guessed = {}
        ends, device = checkpoint.spec.eos_token_ids, torch.device("cpu")
        if on_gpu:
            parts = build_decoder(checkpoint, 2, SameWeights(device, torch.float32)).parts
            guesser = head if isinstance(head, HeadFiles) else self._draft_parts(head)
            runner = QuickRunner(config, checkpoint.spec, parts, ends, device=device, guesser=guesser)
            assert runner._guesser is not None
            if isinstance(runner._guesser, DeviceDraftModel):
                quick = runner._guesser._decoder  # as the model's own
                quick._is_plain = quick._joins_norms = False
            self._listen_to(runner._guesser)
            self._make_engine(config, runner, checkpoint.spec.vocab_size)
            return
        decoder = build_decoder(checkpoint, 512)
        net: DraftNet | None = None
        if isinstance(head, HeadFiles):
            net = build_head(head, decoder.parts.embedding, 512)
        elif head is not None:
            net = DraftModel(build_decoder(head, 512))
        step = TorchStep(decoder, config.kv, net=net)
        drafter = None
        if net is not None:
            drafter = Listening(step, net, Capacity.of(config).num_rows, Silent(beside_model=True))
            drafter.guessed = self.guessed
        self._make_engine(config, CPURunner(config, step, ends, drafter=drafter), checkpoint.spec.vocab_size)

    @staticmethod
    def _draft_parts(model: Checkpoint | None) -> DraftParts:
        assert model is not None
        same = SameWeights(torch.device("cpu"), torch.float32)
        return DraftParts(model.spec, build_decoder(model, 2, same).parts)

    def _make_engine(self, config: EngineConfig, runner: QuickRunner | CPURunner, vocabulary: int) -> None:
        maker = ScriptedMaker(vocabulary)
        self.engine: Engine = build_engine(config, runner, guide_maker=maker, make_checker=InvariantChecker)

    def _listen_to(self, head: DeviceGuesser) -> None:
        guess = head.guess

        def listen(into: Proposals, slot_rows: torch.Tensor, most: int, *, overlapped: bool) -> None:
            into.kind.fill_(-1)  # what the row's own text says is left out
            guess(into, slot_rows, most, overlapped=overlapped)
            rows = head._memory.columns
            for slot, row in enumerate(slot_rows.tolist()):
                number, length = int(head._guesses.number[slot]), int(rows.length[row])
                if number and bool(rows.active[row]):
                    found = head._guesses.token[slot, :number].tolist()
                    seed = int(head._draws.seed[row]) if head._draws.temperature[row] else 0
                    self.guessed[seed, *rows.tokens[row, :length].tolist()] = tuple(found)

        head.guess = listen  # type: ignore[method-assign]

    def finish(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
        return finish(self.engine, requests)

    @property
    def counters(self) -> Counters:
        return self.engine.scheduler.state.counters


class Listening(ModelDrafter):
    guessed: Guessed

    def propose(self, rows: DeviceRows, plan: StepPlan, at: Index) -> Drafts | None:
        found = super().propose(rows, plan, at)
        for row in at.tolist():
            if row in self._guesses:
                assert self._sampler is not None
                parameters, text = self._sampler._parameters, rows.tokens[row, : rows.num_tokens[row]]
                seed = int(parameters.key[row : row + 1].view(np.int64)[0]) if parameters.random[row] else 0
                self.guessed[seed, *text.tolist()] = tuple(token for token, _ in self._guesses[row])
        return found


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCABULARY, length).tolist() for length in lengths]


def agree(one: Guessed, other: Guessed) -> int:
    """How many tokens were guessed by both, all of them the same."""
    common = one.keys() & other.keys()
    for text in common:
        for mine, theirs in zip(one[text], other[text], strict=False):
            assert mine == theirs, f"at {len(text)} tokens: {one[text]} and {other[text]}"
    return sum(min(len(one[text]), len(other[text])) for text in common)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft_model"])
def test_tokens_and_guesses_are_those_of_the_cpu(folder: Path, tmp_path: Path, kind: str) -> None:
    """First a prompt in chunks whose row forks, beside another; then rows that other requests had, one of which finds
    its beginning in the cache."""
    head = draft_model_for(tmp_path / "small") if kind == "draft_model" else head_for(folder, kind)
    short, long, other = prompts(5, 70, 9)
    guided = SamplingParams(max_tokens=3, temperature=0.9, seed=5, structured_outputs=structure(4, 6))
    rounds = [
        [(long, params(seed=1, n=2)), (short, params(temperature=0.0))],
        [(long, params(temperature=0.0)), (other, guided), (short[:3], params(seed=6, max_tokens=9))],
    ]
    found = []
    engines = [
        Guessing(folder, None, on_gpu=False, depth=0),
        Guessing(folder, head, on_gpu=False, depth=0),
        Guessing(folder, head, on_gpu=True, depth=1),
    ]
    for engine in engines:
        found.append([engine.finish(requests) for requests in rounds])
    assert found[1] == found[0] and found[2] == found[0]
    _, cpu, gpu = engines
    assert gpu.counters.accepted_tokens >= 5
    assert gpu.counters.draft_tokens >= gpu.counters.accepted_tokens + 5, "no draft was wrong"
    assert agree(cpu.guessed, gpu.guessed) >= 15
