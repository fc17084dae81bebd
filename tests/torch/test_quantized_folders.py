"""Engines on quantised folders of every kind: torch computes with their very weights, the native kernels with panels
that hold them as 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline import LLM, SamplingParams
from paceline.cli.main import run as run_command
from paceline.errors import ConfigError
from paceline.models.files.open import open_checkpoint
from paceline.runner.native.arena import kind_of, pack
from paceline.runner.native.layout import COLUMNS, GROUP, Q4, Q8, panel_bytes
from tests.pure.models.made import write_folder
from tests.pure.models.quantized_files import CONFIG, FORMATS, WITH_EXPERTS, Written, save, written

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "device": "cpu"}
PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0, detokenize=False)


def answers(folder: Path, **options: Any) -> tuple[list[int], list[float]]:
    llm = LLM(str(folder), **OPTIONS, **options)
    tokens: list[int] = []
    likely: list[float] = []
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        (branch,) = output.outputs
        assert branch.logprobs is not None
        tokens += branch.token_ids
        pairs = zip(branch.token_ids, branch.logprobs, strict=True)
        likely += [entries[token].logprob for token, entries in pairs]
    return tokens, likely


CASES = [(name, CONFIG) for name in FORMATS]
CASES += [
    (name, WITH_EXPERTS) for name in ("fp8 blocks", "compressed int8", "compressed int4 in 32s", "gptq")
]


@pytest.mark.parametrize("name, values", CASES)
def test_answers_are_those_of_the_weights_unpacked(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    model = written(name, values=values)
    dense = {**model.tensors, **{key: value.astype(np.float32) for key, value in model.values.items()}}
    wanted = {key: dense[key] for key in dense if key in model.values or dense[key].dtype == np.float32}
    parts = ("scale", "scale_inv")
    plain = {key: value for key, value in wanted.items() if not key.endswith(parts)}
    expected = answers(write_folder(tmp_path / "dense", values, plain), cpu_backend="torch")
    found = answers(save(tmp_path / "quantised", model), cpu_backend="torch")
    assert found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=1e-3)
    assert len(answers(tmp_path / "quantised", cpu_backend="native")[0]) == 10


@pytest.mark.parametrize("name", FORMATS)
def test_panels_hold_the_weights(name: str, tmp_path: Path) -> None:
    """But for what a scale of 16 bits and, of e4m3, a whole number cannot tell apart."""
    model = written(name)
    checkpoint = open_checkpoint(save(tmp_path, model))
    for tensor, values in model.values.items():
        stored = checkpoint.tensor(tensor)
        kind = kind_of(stored)
        assert kind == (Q4 if FORMATS[name][2] == "INT4" else Q8)
        panels = np.zeros(len(values) // COLUMNS * panel_bytes(kind, values.shape[1]), np.uint8)
        pack(stored, kind, panels)
        found = unpacked(panels, kind, *values.shape)
        largest = np.abs(values.reshape(len(values), -1, GROUP)).max(axis=-1)
        error = np.abs(found - values).reshape(len(values), -1, GROUP).max(axis=-1)
        assert (error <= largest * (0.5 / 127 + 2e-3)).all()


def unpacked(panels: NDArray[np.uint8], kind: int, rows: int, inner: int) -> NDArray[np.float64]:
    """[rows, inner] of panels of 16 rows: for each group words of four bytes, then scales and offsets."""
    quads = 4 if kind == Q4 else 8
    place = panels.reshape(rows // COLUMNS, inner // GROUP, quads * 64 + 64)
    words = place[:, :, : quads * 64].reshape(rows // COLUMNS, -1, quads, COLUMNS, 4)
    halves = np.ascontiguousarray(place[:, :, quads * 64 :]).view(np.float16).astype(np.float64)
    bytes_ = words.transpose(0, 3, 1, 2, 4).reshape(rows, inner // GROUP, quads * 4)
    q = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1) if kind == Q4 else bytes_.view(np.int8)
    scale, offset = (
        halves[:, :, at : at + COLUMNS].transpose(0, 2, 1).reshape(rows, -1, 1) for at in (0, COLUMNS)
    )
    return (q * scale + offset).reshape(rows, inner)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_folder_is_not_quantised_again(tmp_path: Path, quantization: str) -> None:
    folder = save(tmp_path, written("awq"))
    with pytest.raises(ConfigError, match=r"quantised already \(INT4\); leave it at auto"):
        LLM(str(folder), quantization=quantization, **OPTIONS)


def test_fp8_is_for_gpus(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="--quantization fp8 needs a GPU"):
        LLM(str(folder), quantization="fp8", **OPTIONS)


GATE = "model.layers.0.mlp.gate_proj"


def zero_scale(model: Written) -> None:
    model.tensors[f"{GATE}.scales"][0, 0] = 0.0


def unknown_kind(model: Written) -> None:
    model.quantization["quant_method"] = "bitsandbytes"


def odd_groups(model: Written) -> None:
    model.quantization["group_size"] = 96


def no_scales(model: Written) -> None:
    del model.tensors[f"{GATE}.scales"]


@pytest.mark.parametrize(
    "change, options, says",
    [
        (zero_scale, (), "gate_proj.scales holds a scale that is zero or not finite"),
        (no_scales, (), "gate_proj.scales is missing"),
        (unknown_kind, (), "the method 'bitsandbytes' is not read"),
        (odd_groups, (), "groups of 96 do not divide the 128 inputs"),
        (None, ("--quantization", "int8"), "quantised already (INT4); leave it at auto"),
    ],
)
def test_what_is_wrong_ends_a_command_with_one_line(
    change: Callable[[Written], None] | None,
    options: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = written("gptq")
    if change is not None:
        change(model)
    folder = save(tmp_path, model)
    words = ("bench", "throughput", "--workload", "decode-b1", "--device", "cpu", "--model", str(folder))
    assert run_command([*words, *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("paceline: error: ") and printed.count("\n") == 1 and says in printed
