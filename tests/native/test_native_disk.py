"""Prefixes on a disk, on real kernels: output has the same bits whether they are computed or found after a restart, and
whatever became of the files in between."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM
from paceline.audit.runlog import read_run_log
from paceline.config.engine import PreemptionCosts
from paceline.core.standing import WEIGHTS_DROPPED, WEIGHTS_KEPT
from paceline.errors import ConfigError
from paceline.kv.tiers import DISK
from paceline.lab.sim.replayer import replay
from paceline.runner.stores.disk_store import DiskStore
from paceline.runner.stores.store_level import StoreLevel
from tests.e2e.model_cli import environment
from tests.kernels import host_code
from tests.model_folder import write_model, write_weights
from tests.native import disk_victim
from tests.native.disk_victim import NUM_PROMPTS, answer, nap, options

Answers = list[list[tuple[int, float]]]
SIZE = 4 << 20  # about half of what all prompts take


@pytest.fixture(autouse=True)
def cheap_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreLevel, "with_rates", disk_victim.cheap_disk)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    host_code()
    # Heads of 32, which int8 KV needs.
    sizes: dict[str, Any] = {
        "max_position_embeddings": 512,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    folder = write_model(tmp_path_factory.mktemp("model"), **sizes)
    return write_weights(folder)


@pytest.fixture(scope="module")
def computed(model: Path) -> Answers:
    """Every answer, with nothing found anywhere."""
    with LLM(str(model), enable_prefix_caching=False, **options()) as llm:
        return [answer(llm, number)[0] for number in range(NUM_PROMPTS)]


def run(model: Path, folder: Path, numbers: list[int], **changes: Any) -> tuple[Answers, list[int]]:
    """Answers of an engine of its own, and the tokens each found."""
    given = {"kv_disk_dir": str(folder), "kv_disk_size": 1 << 26, **options(), **changes}
    with LLM(str(model), **given) as llm:
        answers = [answer(llm, number) for number in numbers]
    return [each for each, _ in answers], [found for _, found in answers]


@pytest.mark.parametrize(("backend", "kv_type"), [("native", "auto"), ("native", "int8"), ("torch", "auto")])
def test_output_has_the_same_bits_from_the_disk(
    model: Path, tmp_path: Path, backend: str, kv_type: str
) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    numbers, kind = list(range(6)), {"cpu_backend": backend, "kv_cache_dtype": kv_type}
    with LLM(str(model), enable_prefix_caching=False, **kind, **options()) as llm:
        expected = [answer(llm, number)[0] for number in numbers]
    cold, found = run(model, tmp_path, numbers, **kind)
    assert cold == expected and found == [0] * 6
    warm, found = run(model, tmp_path, numbers, **kind)
    assert warm == expected
    assert found == [384] * 6


def test_a_warm_start_replays(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "kv", [0, 1, 2])
    log = tmp_path / "run.jsonl"
    _, found = run(model, tmp_path / "kv", [2, 3, 0, 8], run_log=str(log))
    assert found[0] == 384
    assert '"restored"' in log.read_text()
    again = tmp_path / "again.jsonl"
    report = replay(read_run_log(log), output=again)
    assert report.is_equal, report
    assert again.read_bytes() == log.read_bytes()


def test_a_model_finds_after_a_sleep_what_the_disk_has(
    model: Path, tmp_path: Path, computed: Answers
) -> None:
    """Asleep while blocks are written, or when all are; and that replays."""
    log = tmp_path / "run.jsonl"
    disk = {"kv_disk_dir": str(tmp_path / "kv"), "kv_disk_size": 1 << 26}
    with LLM(str(model), run_log=str(log), **disk, **options()) as llm:
        engine = llm.loaded.engine
        for level in (WEIGHTS_KEPT, WEIGHTS_DROPPED):
            for number in (0, 1):
                assert answer(llm, number)[0] == computed[number]
                nap(llm, level)
        for number in (0, 1):
            assert answer(llm, number)[0] == computed[number]
        while not engine.is_idle:
            engine.step()
        assert len(engine.scheduler.state.kv.levels[DISK][0].cache) >= 48
        nap(llm, WEIGHTS_KEPT)
        assert [answer(llm, number) for number in (0, 1)] == [(each, 384) for each in computed[:2]]
        assert llm.loaded.store_work().blocks_read >= 48, "figures go on"
    report = replay(read_run_log(log))
    assert report.is_equal, report


def test_what_another_kernel_or_type_has_computed_is_not_found(
    model: Path, tmp_path: Path, computed: Answers
) -> None:
    pytest.importorskip("torch")
    run(model, tmp_path, [0, 1], cpu_backend="torch")
    answers, found = run(model, tmp_path, [0, 1])
    assert answers == computed[:2] and found == [0, 0]


def test_other_weights_under_the_same_name_find_nothing(
    tmp_path: Path, model: Path, computed: Answers
) -> None:
    copied = tmp_path / "model"
    copied.mkdir()
    for path in model.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    answers, _ = run(copied, tmp_path / "kv", [0])
    assert answers == computed[:1]
    weights = copied / "model.safetensors"
    before = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(before[:8], "little")
    values = np.frombuffer(bytes(before[start:]), np.float32) * np.float32(1.25)
    weights.write_bytes(bytes(before[:start]) + values.tobytes())
    with LLM(str(copied), enable_prefix_caching=False, **options()) as llm:
        expected = answer(llm, 0)[0]
    assert expected != computed[0]
    answers, found = run(copied, tmp_path / "kv", [0])
    assert answers == [expected] and found == [0]
    weights.write_bytes(bytes(before))  # and the first ones again: their places were taken
    answers, _ = run(copied, tmp_path / "kv", [0])
    assert answers == computed[:1]


def flip(folder: Path, rng: random.Random) -> None:
    for name, times in (("data", 40), ("index", 1)):
        text = bytearray((folder / name).read_bytes())
        for _ in range(times):
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(text)


def cut(folder: Path, rng: random.Random) -> None:
    for name in ("index", "data"):
        path = folder / name
        os.truncate(path, rng.randrange(path.stat().st_size))


def swap(folder: Path, rng: random.Random) -> None:
    path = folder / "data"
    text = path.read_bytes()
    at = rng.randrange(len(text) // 8192) * 8192
    path.write_bytes(text[at:] + text[:at])


def lose_the_key(folder: Path, rng: random.Random) -> None:
    (folder / "key").write_bytes(rng.randbytes(rng.choice((0, 31, 32))))


SPOILT: list[Callable[[Path, random.Random], None]] = [flip, cut, swap, lose_the_key]


@pytest.mark.parametrize("spoil", SPOILT)
def test_spoilt_files_change_no_answer(
    model: Path, tmp_path: Path, computed: Answers, spoil: Callable[[Path, random.Random], None]
) -> None:
    numbers = list(range(4))
    run(model, tmp_path, numbers)
    spoil(tmp_path, random.Random(1))
    answers, _ = run(model, tmp_path, numbers)
    assert answers == computed[:4]
    answers, found = run(model, tmp_path, numbers)
    assert answers == computed[:4] and found == [384] * 4


def killed(model: Path, folder: Path, computed: Answers, seed: int) -> int:
    """One engine that is killed at some moment; tokens it found. Every answer it gave was right."""
    rng = random.Random(seed)
    command = [sys.executable, "-m", disk_victim.__name__, str(model), str(folder), str(SIZE), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True)
    assert process.stdout is not None
    found = 0
    try:
        assert json.loads(process.stdout.readline()) == "ready"
        for _ in range(rng.randrange(2, 12)):
            number, answered, cached = json.loads(process.stdout.readline())
            assert [tuple(each) for each in answered] == computed[number]
            found += cached
        time.sleep(rng.random() / 5)  # any moment will do
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    return found


def killed_often(model: Path, folder: Path, computed: Answers, seeds: range, spoils: bool) -> None:
    rng = random.Random(seeds.start)
    found = 0
    for seed in seeds:
        found += killed(model, folder, computed, seed)
        used = sum(path.stat().st_size for path in folder.iterdir())
        assert used <= SIZE
        if spoils and rng.random() < 0.3:
            rng.choice(SPOILT)(folder, rng)
    assert found > 0
    answers, _ = run(model, folder, list(range(NUM_PROMPTS)), kv_disk_size=SIZE)
    assert answers == computed


def test_an_engine_that_was_killed_starts_again_and_answers_right(
    model: Path, tmp_path: Path, computed: Answers
) -> None:
    killed_often(model, tmp_path, computed, range(2), spoils=False)


@pytest.mark.campaign
def test_an_engine_that_is_killed_often_and_finds_spoilt_files_answers_right(
    model: Path, tmp_path: Path, computed: Answers
) -> None:
    killed_often(model, tmp_path, computed, range(100, 200), spoils=True)


def test_a_folder_is_used_by_one_engine(model: Path, tmp_path: Path) -> None:
    with (
        LLM(str(model), kv_disk_dir=str(tmp_path), kv_disk_size=1 << 26, **options()),
        pytest.raises(ConfigError, match="in use by another server"),
    ):
        run(model, tmp_path, [0])
    run(model, tmp_path, [0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_disk_dir": None}, "needs --kv-disk-dir"),
        ({"kv_disk_size": 1000}, "holds no block"),
        ({"enable_prefix_caching": False}, "needs prefix caching"),
        ({"mode": "static"}, "--mode continuous"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run(model, tmp_path, [0], **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("instead", ["/dev/full", "/"])  # what cannot be written, or not read either
def test_a_disk_that_is_full_or_gone_while_serving_fails_no_request(
    model: Path, tmp_path: Path, computed: Answers, caplog: pytest.LogCaptureFixture, instead: str
) -> None:
    run(model, tmp_path, [0, 1])
    with LLM(str(model), kv_disk_dir=str(tmp_path), kv_disk_size=1 << 26, **options()) as llm:
        tiers = llm._front.engine.scheduler.state.tiers
        store = llm._front.engine.on_close.__self__.store  # type: ignore[attr-defined]
        broken = os.open(instead, os.O_RDONLY if instead == "/" else os.O_RDWR)
        for handle in {store._data, store._direct} - {None}:
            os.dup2(broken, handle)
        os.close(broken)
        answers = [answer(llm, number)[0] for number in range(NUM_PROMPTS)]
        assert answers == computed
        assert not tiers.has_disk
        assert "is off until the server is started again" in caplog.text


def test_a_disk_that_stalls_is_waited_for_no_longer_than_computing(
    model: Path, tmp_path: Path, computed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cheap(_: StoreLevel, costs: PreemptionCosts) -> PreemptionCosts:
        return replace(costs, token_s=1e-3, disk_block_s=1e-5)

    is_asked, may_go = threading.Event(), threading.Event()

    def stall(*given: object) -> bool:
        is_asked.set()
        may_go.wait(60.0)
        return False

    run(model, tmp_path, [0, 1])
    monkeypatch.setattr(StoreLevel, "with_rates", cheap)
    monkeypatch.setattr(DiskStore, "read", stall)
    with LLM(str(model), kv_disk_dir=str(tmp_path), kv_disk_size=1 << 26, **options()) as llm:
        assert [answer(llm, number) for number in (0, 1)] == [(each, 0) for each in computed[:2]]
        assert is_asked.is_set()
        may_go.set()
