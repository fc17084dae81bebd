"""Folders of draft heads: what is written is read, and a head for another model is refused by the tensor's name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.config.engine import ModelConfig
from paceline.config.speculative import DraftConfig
from paceline.errors import ConfigError
from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.head_folder import (
    HeadFiles,
    head_kind,
    head_tensors,
    new_head,
    open_head,
    write_head,
)
from paceline.models.files.safetensors import SafetensorsFile, write_safetensors
from paceline.models.spec import ModelSpec
from paceline.runner.guessers import open_guesser, why_torch
from tests.model_folder import write_model, write_weights
from tests.quantized_helpers import tiny_spec


def made(kind: str, target: ModelSpec, draft_vocab: int = 40) -> HeadFiles:
    spec = new_head(kind, target, draft_vocab, num_heads=2)
    rng = np.random.default_rng(1)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in head_tensors(spec)}
    return HeadFiles(
        spec=spec, tensors=tensors, to_target=np.sort(rng.permutation(target.vocab_size)[:draft_vocab])
    )


def rewrite(folder: Path, **changed: NDArray[Any] | None) -> None:
    """Change tensors of a head, or leave them out; names have _ for dots."""
    path = folder / "model.safetensors"
    file = SafetensorsFile(path)
    arrays: dict[str, NDArray[Any]] = {}
    for name, entry in file.entries.items():
        if entry.dtype == "I64":
            arrays[name] = file.integers(name)
        elif entry.dtype != "BOOL":
            arrays[name] = np.array(file.tensor(name).to_float32())
    for name in list(arrays):
        if name.replace(".", "_") in changed:
            new = changed[name.replace(".", "_")]
            if new is None:
                del arrays[name]
            else:
                arrays[name] = new
    write_safetensors(path, arrays, {})


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@pytest.mark.parametrize("draft_vocab", [40, 160])
def test_what_is_written_is_read(tmp_path: Path, kind: str, draft_vocab: int) -> None:
    target = tiny_spec()
    head = made(kind, target, draft_vocab)
    if draft_vocab == target.vocab_size:
        head = HeadFiles(spec=head.spec, tensors=head.tensors, to_target=np.arange(draft_vocab))
    write_head(tmp_path, head, target, {"command": "paceline train-head", "figures": [0.5]})
    assert head_kind(tmp_path) == kind
    read = open_head(tmp_path, target)
    assert read.spec == head.spec
    assert np.array_equal(read.to_target, head.to_target)
    assert read.tensors.keys() == head.tensors.keys()
    assert all(np.array_equal(read.tensors[name], head.tensors[name]) for name in head.tensors)
    assert json.loads((tmp_path / "config.json").read_text())["paceline"]["figures"] == [0.5]


def test_the_layout_is_the_published_one(tmp_path: Path) -> None:
    """Names of an EAGLE-3 folder, and the offsets that its d2t has; newer writers call the layer another name."""
    target = tiny_spec()
    head = made("eagle", target)
    write_head(tmp_path, head, target, {})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert {name for name in file.entries if "midlayer" not in name} == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    }
    assert file.entries["t2d"].dtype == "BOOL" and file.entries["t2d"].shape == (160,)
    assert np.array_equal(file.integers("d2t") + np.arange(40), head.to_target)
    other: dict[str, NDArray[Any]] = {
        name.replace("midlayer.", "layers.0."): values for name, values in head.tensors.items()
    }
    write_safetensors(tmp_path / "model.safetensors", {**other, "d2t": file.integers("d2t")}, {})
    assert open_head(tmp_path, target).tensors.keys() == head.tensors.keys()


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("eagle", "fc_weight", None),
        ("eagle", "midlayer_self_attn_k_proj_weight", None),
        ("eagle", "d2t", None),
        ("eagle", "d2t", np.full(40, 3) - np.arange(40)),
        ("eagle", "d2t", np.full(40, 500)),
        ("eagle", "lm_head_weight", np.zeros((39, 128), np.float32)),
        ("eagle", "norm_weight", np.full(128, np.nan, np.float32)),
        ("medusa", "medusa_head_1_1_weight", None),
        ("medusa", "medusa_head_0_0_linear_weight", np.zeros((64, 64), np.float32)),
    ],
)
def test_a_head_with_another_tensor_is_refused_by_its_name(
    tmp_path: Path, kind: str, name: str, change: NDArray[Any] | None
) -> None:
    target = tiny_spec()
    head = made(kind, target)
    write_head(tmp_path, head, target, {})
    rewrite(tmp_path, **{name: change})
    full = next(each for each in (*head.tensors, "d2t") if each.replace(".", "_") == name)
    with pytest.raises(CheckpointError, match=rf"tensor {full}"):
        open_head(tmp_path, target)


@pytest.mark.parametrize(
    ("field", "says"), [("hidden_size", "fc.weight"), ("vocab_size", "draft_vocab_size")]
)
def test_a_head_of_another_model_is_refused(tmp_path: Path, field: str, says: str) -> None:
    target = tiny_spec()
    write_head(tmp_path, made("eagle", target), target, {})
    other = replace(target, hidden_size=32) if field == "hidden_size" else replace(target, vocab_size=32)
    with pytest.raises(CheckpointError, match=says):
        open_head(tmp_path, other)


def test_what_makes_drafts_is_looked_at_before_the_start(tmp_path: Path) -> None:
    target = tiny_spec()
    write_head(tmp_path / "head", made("medusa", target), target, {})
    model = ModelConfig()
    drafts = DraftConfig(method="eagle", model=str(tmp_path / "head"))
    with pytest.raises(ConfigError, match="is for the method medusa, not for eagle"):
        open_guesser(drafts, target, model)
    head = open_guesser(DraftConfig(method="history", model=drafts.model), target, model)
    assert isinstance(head, HeadFiles)
    assert why_torch(model, head) == (
        "steps are computed by torch, not by the native CPU kernels: these compute no medusa head"
    )
    with pytest.raises(ConfigError, match="--cpu-backend native computes no medusa head"):
        why_torch(ModelConfig(cpu_backend="native"), head)
    with pytest.raises(ConfigError, match="--quantization int8"):
        why_torch(ModelConfig(quantization="int8"), head)
    other = write_weights(write_model(tmp_path / "other"))
    with pytest.raises(
        ConfigError, match=r"model\.embed_tokens\.weight of .* has 100 tokens, the model has 160"
    ):
        open_guesser(DraftConfig(method="draft_model", model=str(other)), target, model)
