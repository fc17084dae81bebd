"""Ranks as processes: the lead in this one, a follower beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.standing import WEIGHTS_DROPPED, WEIGHTS_KEPT
from paceline.core.structure import Structure
from paceline.errors import ConfigError, EngineFailed
from paceline.runner.parallel.lead import Followers
from paceline.runner.parallel.link import Kind
from paceline.runner.parallel.wire import encode
from tests.torch.llm_helpers import OPTIONS
from tests.waiting import wait_until

# What is evicted by its expected reuse depends on when it was used, and with it the numbers of blocks in plans.
RANKED = {
    **OPTIONS,
    "device": "cpu",
    "cpu_backend": "torch",
    "num_host_blocks": 32,
    "num_blocks": 12,
    "eviction": "lru",
}
PROMPTS = [
    f"{word} of the prompt, and more of it" for word in ("First", "Second", "Third", "Fourth", "Fifth")
]
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=24, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=24, n=2, frequency_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=Structure.of({"regex": "[a-c]{4,9}"})),
    SamplingParams(seed=5, max_tokens=24, min_p=0.1, prompt_logprobs=1),
]


def opened(folder: Path, size: int, **more: Any) -> LLM:
    return LLM(str(folder), tensor_parallel_size=size, **{**RANKED, **more})


def followers_of(llm: LLM) -> Any:
    return llm.loaded.sleeper._weights.followers  # type: ignore[attr-defined]


def answers(llm: LLM) -> tuple[list[Any], list[bytes]]:
    """Tokens and text of each answer, and all plans as bytes."""
    runner = llm.loaded.engine._runner
    plans: list[bytes] = []
    submit = runner.submit

    def keep(plan: Any) -> Any:
        plans.append(encode(plan))
        return submit(plan)

    runner.submit = keep  # type: ignore[method-assign]
    try:
        found = llm.generate(PROMPTS, ASKED, use_tqdm=False)
    finally:
        runner.submit = submit  # type: ignore[method-assign]
    return [(each.token_ids, each.text) for output in found for each in output.outputs], plans


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[tuple[list[Any], list[bytes]]]:
    with opened(folder, 1, preemption="swap") as llm:
        yield answers(llm)


@pytest.fixture(scope="module")
def ranked(folder: Path) -> Iterator[LLM]:
    with opened(folder, 2, preemption="swap") as llm:
        yield llm


def test_two_ranks_give_the_answers_of_one_from_the_same_plans(
    ranked: LLM, alone: tuple[list[Any], list[bytes]]
) -> None:
    tokens, plans = answers(ranked)
    assert tokens == alone[0]
    assert plans == alone[1]
    assert ranked.loaded.engine.scheduler.state.counters.preempted > 0, "nothing was swapped"


def test_the_start_says_how_many_ranks_there_are_and_what_computes(ranked: LLM) -> None:
    assert ranked.loaded.hardware.runner["ranks"] == 2
    assert any("native CPU kernels know no ranks" in notice for notice in ranked.loaded.notices)


@pytest.mark.campaign
def test_drafts_are_the_same_on_every_rank(folder: Path) -> None:
    options = {"speculative_config": "ngram", "max_num_seqs": 4}
    words = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)] * 2
    with opened(folder, 1, **options) as llm:
        plain = [
            each.outputs[0].token_ids for each in llm.generate(["a b a b a b a"] * 2, words, use_tqdm=False)
        ]
    with opened(folder, 2, **options) as llm:
        found = [
            each.outputs[0].token_ids for each in llm.generate(["a b a b a b a"] * 2, words, use_tqdm=False)
        ]
        assert llm.loaded.engine.scheduler.state.counters.draft_tokens > 0
    assert found == plain


@pytest.mark.campaign
def test_a_model_on_ranks_sleeps_and_wakes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder, 2) as llm:
        engine, sleeper, pids = llm.loaded.engine, llm.loaded.sleeper, followers_of(llm).pids
        before = llm.generate(PROMPTS[:2], ASKED[:2], use_tqdm=False)
        told: list[Kind] = []
        tell = Followers.tell

        def tell_and_note(self: Followers, kind: Kind, payload: bytes = b"") -> None:
            told.append(kind)
            tell(self, kind, payload)

        monkeypatch.setattr(Followers, "tell", tell_and_note)
        for level in (WEIGHTS_KEPT, WEIGHTS_DROPPED):
            engine.sleep(levels_lost=sleeper.levels_lost)
            told.clear()
            sleeper.let_go(level)
            assert told == [Kind.CLOSE], "a model that sleeps holds no KV on any rank"
            assert all(map(is_gone, pids)) == (level == WEIGHTS_DROPPED)
            engine.wake(sleeper.open())
            after = llm.generate(PROMPTS[:2], ASKED[:2], use_tqdm=False)
            assert [each.outputs[0].token_ids for each in after] == [
                each.outputs[0].token_ids for each in before
            ]
        pids = followers_of(llm).pids
    assert all(map(is_gone, pids)), "a follower outlives its model"


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


LEAD = """
import sys, time
from paceline import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, load_format="dummy", device="cpu", num_blocks=24, max_num_seqs=2)
print(*llm.loaded.sleeper._weights.followers.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_followers_end_with_a_lead_that_is_killed(folder: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as lead:
        assert lead.stdout is not None
        pids = [int(word) for word in lead.stdout.readline().split()]
        assert len(pids) == 1
        lead.send_signal(number)
        lead.wait()
    wait_until(lambda: all(map(is_gone, pids)))


def test_a_follower_that_cannot_load_its_part_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.runner.parallel.lead as lead

    start = lead.COMMAND
    broken = "import paceline.models.files.open as o\no.open_checkpoint = None\nimport runpy\n"
    monkeypatch.setattr(
        lead,
        "COMMAND",
        (
            start[0],
            "-P",
            "-c",
            broken + "runpy.run_module('paceline.runner.parallel.follow', run_name='__main__')",
        ),
    )
    with pytest.raises(ConfigError, match="a rank could not load"):
        opened(folder, 2)


def test_followers_end_where_the_model_cannot_be_used_after_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Followers] = []
    loaded = Followers.wait_until_loaded

    def wait_until_loaded(self: Followers) -> None:
        loaded(self)
        seen.append(self)

    monkeypatch.setattr(Followers, "wait_until_loaded", wait_until_loaded)
    with pytest.raises(ConfigError, match="oracle is for measurements on a GPU"):
        opened(folder, 2, speculative_config='{"method": "oracle"}')
    (followers,) = seen
    assert all(map(is_gone, followers.pids))


def test_a_rank_that_is_killed_ends_the_engine_with_every_request_answered(ranked: LLM) -> None:
    """The last test of this module that needs both ranks alive."""
    followers = followers_of(ranked)
    (pid,) = followers.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFailed):
        ranked.generate(PROMPTS, ASKED[0], use_tqdm=False)
    assert followers.lost == "rank 1 was ended by signal 9"
    assert is_gone(pid)
