"""Bad input around the native kernels: one line and exit code 2, or a notice; and files with numbers that are none."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.stored import StoredTensor
from paceline.models.spec import ModelSpec
from paceline.runner.machine_load import cores_allowed
from paceline.runner.native.model import build_model
from tests.e2e.model_cli import TINY, run
from tests.model_folder import write_model
from tests.native.random_steps import tiny
from tests.quantized_helpers import HAND_LAYOUT, QuantizedSource, by_hand

OTHER_WAY = "--cpu-backend torch computes it with torch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cpu-backend", "cuda"), ("--cpu-backend must be one of", "auto", "native", "torch")),
        (("--cpu-threads", "0"), ("--cpu-threads must be at least 1",)),
        (("--cpu-threads", "-3"), ("--cpu-threads must be at least 1",)),
        (("--cpu-threads", "two"), ("--cpu-threads",)),
        (
            ("--speculative-config", "luck"),
            ("--speculative-config: method 'luck' is not off, auto, ngram, history",),
        ),
        (
            ("--speculative-config", "eagle"),
            ("--speculative-config: method eagle needs model, the folder of a head",),
        ),
        (("--speculative-config", "{"), ("--speculative-config is not JSON",)),
        (
            ("--cpu-backend", "native", "--block-size", "8"),
            ("blocks of 8 tokens are not a multiple of 16", OTHER_WAY),
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_one_line(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    done = run("run", "--model", folder, *TINY, *arguments, "hi", cache=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("paceline: error: ") and done.stderr.count("\n") == 1
    assert all(part in done.stderr for part in says), done.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"intermediate_size": 48}, "its intermediate size of 48 is not a multiple of 32"),
        ({"hidden_size": 32}, "its head size of 8 is not a multiple of 16"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "(dynamic)"),
    ],
    ids=str,
)
def test_a_model_that_is_not_covered_is_told_with_what_would_work(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    model = write_model(tmp_path / "model", **changes)
    done = run("run", "--model", model, *TINY, "--cpu-backend", "native", "hi", cache=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert reason in done.stderr and OTHER_WAY in done.stderr


@pytest.mark.parametrize(
    "asked", ["sse9", "AVX2", " ", "avx512" if os.uname().machine == "aarch64" else "neon"]
)
def test_instructions_that_are_not_there_are_one_line_with_a_list(
    folder: Path, tmp_path: Path, asked: str
) -> None:
    done = run("run", "--model", folder, *TINY, "hi", cache=tmp_path, PACELINE_CPU_ISA=asked)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"PACELINE_CPU_ISA={asked}: this processor can take " in done.stderr and "plain" in done.stderr


@pytest.mark.parametrize("more", [1, 500])
def test_more_threads_than_cores_are_a_notice(
    folder: Path, more: int, caplog: pytest.LogCaptureFixture
) -> None:
    cores = cores_allowed()
    with caplog.at_level(logging.INFO, "paceline"):
        llm = LLM(str(folder), load_format="dummy", num_blocks=64, cpu_threads=cores + more)
    notice = f"--cpu-threads {cores + more}: {cores} are used, one for each core there is"
    assert [record.getMessage() for record in caplog.records].count(notice) == 1
    (output,) = llm.generate(["hi"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


# ---------------------------------------------------------------- numbers that are none


class Damaged(QuantizedSource):
    """A model with one tensor changed."""

    def __init__(self, spec: ModelSpec, dtype: str, changed: StoredTensor) -> None:
        super().__init__(spec, dtype)
        self._tensors[changed.name] = changed


NAME = "model.layers.0.mlp.down_proj.weight"
SCALES = {"Q4_0": (18, (0,)), "Q4_1": (20, (0, 2)), "Q8_0": (34, (0,)), "Q5_1": (24, (0, 2)), **HAND_LAYOUT}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("dtype", "at"), [(dtype, at) for dtype in SCALES for at in SCALES[dtype][1]])
def test_a_scale_that_is_not_finite_is_refused_by_name(dtype: str, at: int, value: float) -> None:
    spec = tiny(inner=256)
    tensor = QuantizedSource(spec, "Q8_0").tensor(NAME)
    if dtype in HAND_LAYOUT:
        tensor = by_hand(NAME, (tensor.shape[0], tensor.shape[1]), dtype, np.random.default_rng(0))
    else:
        tensor = QuantizedSource(spec, dtype).tensor(NAME)
    raw = tensor.raw.copy()
    block = raw.reshape(-1, SCALES[dtype][0])[-1]
    block[at : at + 2] = np.array([value], np.float16).view(np.uint8)
    damaged = StoredTensor(name=NAME, shape=tensor.shape, dtype=dtype, raw=raw, decode=tensor.decode)
    with pytest.raises(CheckpointError, match=NAME):
        build_model(Damaged(spec, "Q8_0", damaged), 64)


@pytest.mark.parametrize("name", [NAME, "model.embed_tokens.weight", "model.norm.weight"])
def test_a_dense_number_that_is_not_finite_is_refused_by_name(name: str) -> None:
    spec = tiny()
    tensor = QuantizedSource(spec, "F32").tensor(name)
    raw = tensor.raw.copy()
    raw.view(np.float32)[-1] = np.nan
    damaged = StoredTensor(name=name, shape=tensor.shape, dtype="F32", raw=raw, decode=tensor.decode)
    with pytest.raises(CheckpointError, match=name):
        build_model(Damaged(spec, "F32", damaged), 64)
