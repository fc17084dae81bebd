"""What the lead of several ranks makes of what its followers say, and what ranks refuse."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.cli.serve.view import _kernels
from paceline.config.engine import ModelConfig
from paceline.config.model_set import ModelShare
from paceline.config.speculative import DraftConfig
from paceline.core.guide import Guide
from paceline.core.plan import EMPTY, StepResult, i32
from paceline.errors import ConfigError
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.process.engine_main import _load
from paceline.process.frames import Configure, FurtherModel
from paceline.runner.parallel.lead import DONE, LeadPending, RankLost, ToldGuide, checksum_of
from paceline.runner.parallel.limits import check_ranks
from paceline.runner.parallel.link import Kind, Link, LinkClosed, watch
from tests.model_folder import write_model


def result(tickets: Any = EMPTY, token: int = 5) -> StepResult:
    return StepResult(
        seq=3,
        rows=i32([0]),
        generation=i32([1]),
        tokens=i32([token]).reshape(1, 1),
        count=i32([1]),
        finished=np.zeros(1, np.uint8),
        finite=np.ones(1, np.bool_),
        copies_done=tickets,
    )


class Own:
    """The lead's own step."""

    def __init__(self, found: StepResult | Exception) -> None:
        self._found = found

    def supply(self, guides: Mapping[int, Guide]) -> None: ...

    def wait(self) -> StepResult:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


class Said:
    """Followers that say what they were given."""

    last_failure = "rank 1: no"

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = answers
        self.told: list[tuple[Kind, bytes]] = []
        self.lost = ""

    def tell(self, kind: Kind, payload: bytes = b"") -> None:
        self.told.append((kind, payload))

    def answers(self, timeout_s: float | None = None) -> list[memoryview | None]:
        return [None if answer is None else memoryview(answer) for answer in self._answers]

    def diverged(self, reason: str) -> RankLost:
        self.lost = reason
        return RankLost(reason)


def done(found: StepResult, tickets: Any = EMPTY) -> bytes:
    told: bytes = tickets.tobytes()
    return DONE.pack(found.seq, checksum_of(found)) + told


def wait(own: StepResult | Exception, said: Said) -> StepResult:
    return LeadPending(Own(own), said, 3).wait()  # type: ignore[arg-type]


def test_a_ticket_has_completed_when_it_has_on_every_rank() -> None:
    own = result(i32([4, 5, 6]))
    said = Said(done(own, i32([4, 5])), done(own, i32([5, 6, 4])))
    assert wait(own, said).copies_done.tolist() == [4, 5]
    assert said.told == [(Kind.RUN, struct.pack("<q", 3))]


def test_ranks_that_find_other_tokens_compute_no_further_step() -> None:
    said = Said(done(result()), done(result(token=6)))
    with pytest.raises(RankLost, match="other tokens"):
        wait(result(), said)
    assert said.lost


def test_a_step_that_failed_on_every_rank_leaves_them_together() -> None:
    said = Said(None, None)
    with pytest.raises(MemoryError):
        wait(MemoryError(), said)
    assert not said.lost


@pytest.mark.parametrize("own", [MemoryError(), result()])
def test_a_step_that_failed_on_some_ranks_only_ends_them(own: StepResult | Exception) -> None:
    with pytest.raises(RankLost, match="alone|on one rank"):
        wait(own, Said(done(result()), None))


class Counting:
    """A guide that allows what it has been given."""

    is_over, error = True, ""

    def __init__(self, mask: Any) -> None:
        self._mask = mask

    def consume(self, tokens: Any) -> None: ...
    def mask(self) -> Any:
        return self._mask

    def forced(self) -> list[int]:
        return [7, 8]

    def accepts(self, tokens: Any) -> int:
        return 1

    def copy(self) -> Guide:
        return Counting(None)

    def end_reasoning(self) -> bool:
        return False


def test_followers_are_told_whatever_a_guide_says() -> None:
    said = Said()
    guide = ToldGuide(Counting(np.array([1, 2], np.uint32)), said)  # type: ignore[arg-type]
    assert (guide.forced(), guide.accepts([1]), guide.is_over, guide.copy().mask()) == ([7, 8], 1, True, None)
    guide.mask()
    assert [kind for kind, _ in said.told] == [Kind.ANSWER] * 5
    sizes = [len(payload) for _, payload in said.told]
    assert sizes == [16, 8, 8, 0, 8]


def test_the_end_of_the_other_side_is_noticed_by_a_thread() -> None:
    ours, theirs = socket.socketpair()
    gone = Event()
    watch([Link(ours)], lambda place: gone.set())
    link = Link(theirs)
    link.send(Kind.DONE, b"x" * 10)
    kind, payload = Link(ours).receive()
    assert (kind, bytes(payload)) == (Kind.DONE, b"x" * 10)
    assert not gone.is_set()
    link.close()
    assert gone.wait(30)
    with pytest.raises(LinkClosed):
        Link(ours).receive()
    ours.close()


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_model(tmp_path_factory.mktemp("model")), load_format="dummy")


def check(
    checkpoint: Checkpoint, *, drafts: DraftConfig | None = None, on_gpu: bool = False, **given: Any
) -> None:
    check_ranks(ModelConfig(tensor_parallel_size=2, **given), checkpoint, drafts, on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cpu_backend": "native"}, "--cpu-backend native"),
        ({"quantization": "int8"}, "--quantization int8"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"kv_disk_dir": "somewhere"}, "--kv-disk-dir"),
        ({"kv_store": "redis://localhost", "kv_store_key": "key"}, "--kv-store"),
        ({"context_reuse": "blend"}, "--context-reuse blend"),
        ({"drafts": DraftConfig(method="eagle", model="head")}, "a head or a model that drafts"),
        ({"on_gpu": True}, "on a CPU only so far"),
    ],
)
def test_what_ranks_do_not_have_is_refused_by_name(
    checkpoint: Checkpoint, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check(checkpoint, **given)


def test_what_ranks_have_is_not_refused(checkpoint: Checkpoint) -> None:
    check(checkpoint, drafts=DraftConfig(method="ngram"), kv_cache_dtype="int8")


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(checkpoint: Checkpoint) -> None:
    heads = checkpoint.spec.num_heads
    with pytest.raises(
        ConfigError, match=f"--tensor-parallel-size 7: {heads} attention heads.*can have 1, 2"
    ):
        check_ranks(ModelConfig(tensor_parallel_size=7), checkpoint, None, on_gpu=False)


def test_a_model_that_sees_pictures_has_one_rank(checkpoint: Checkpoint) -> None:
    seeing = replace(checkpoint, spec=replace(checkpoint.spec, vision=checkpoint.spec))
    with pytest.raises(ConfigError, match="sees pictures"):
        check(seeing)


def test_several_models_have_one_rank_each() -> None:
    further = FurtherModel(ModelConfig(tensor_parallel_size=2), {}, ModelShare())
    configure = Configure(ModelConfig(), {}, 0.1, 0.1, 1 << 20, further=[further])
    with pytest.raises(ConfigError, match="does not go with several models"):
        _load(configure, lambda stage, done, total: None)


def test_the_start_names_the_ranks() -> None:
    info = SimpleNamespace(runner={"name": "torch", "ranks": 3, "threads": 1})
    assert _kernels(info) == [("ranks", "3 processes with a part of each layer, 1 thread each")]  # type: ignore[arg-type]
