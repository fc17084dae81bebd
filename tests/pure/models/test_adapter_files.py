"""PEFT LoRA folders: what is written is read, and whatever does not fit is refused with its name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidAdapter
from paceline.models.files.adapter_files import Adapter, folder_below, open_adapter
from tests.adapter_folders import PREFIX, Arrays, adapter_arrays, write_adapter
from tests.pure.models.made import config, spec_of

SPEC = spec_of(config())
FIRST_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
FIRST_B = FIRST_A.replace("lora_A", "lora_B")


def opened(folder: Path, max_rank: int = 16) -> Adapter:
    return open_adapter(folder, SPEC, max_rank)


def refusal(folder: Path, max_rank: int = 16) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        opened(folder, max_rank)
    assert caught.value.code == "invalid_adapter"
    return str(caught.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    arrays = adapter_arrays(SPEC)
    adapter = opened(write_adapter(tmp_path, arrays, lora_alpha=6))
    assert adapter.rank == 4
    assert set(adapter.parts) == {
        (layer, part) for layer in (0, 1) for part in ("q", "k", "v", "o", "gate", "up", "down")
    }
    pair = adapter.parts[0, "q"]
    np.testing.assert_array_equal(pair.a, arrays[FIRST_A])
    np.testing.assert_array_equal(pair.b, arrays[FIRST_B] * np.float32(1.5))


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    arrays = adapter_arrays(SPEC, ("q_proj",))
    adapter = opened(write_adapter(tmp_path, arrays, targets=["q_proj"], lora_alpha=6, use_rslora=True))
    np.testing.assert_array_equal(adapter.parts[0, "q"].b, arrays[FIRST_B] * np.float32(6 / math.sqrt(4)))


def test_ranks_and_alphas_of_single_modules(tmp_path: Path) -> None:
    arrays = adapter_arrays(SPEC, ("q_proj", "v_proj")) | adapter_arrays(SPEC, ("v_proj",), rank=2)
    adapter = opened(
        write_adapter(
            tmp_path,
            arrays,
            targets=["q_proj", "v_proj"],
            lora_alpha=4,
            rank_pattern={"v_proj": 2},
            alpha_pattern={"^model.layers.0.self_attn.q_proj": 12},
        )
    )
    assert adapter.rank == 4
    assert adapter.parts[0, "v"].a.shape == (2, 16)
    np.testing.assert_array_equal(adapter.parts[0, "q"].b, arrays[FIRST_B] * np.float32(3))
    other = FIRST_B.replace("layers.0", "layers.1")
    np.testing.assert_array_equal(adapter.parts[1, "q"].b, arrays[other])


def test_some_layers_only(tmp_path: Path) -> None:
    arrays = {name: each for name, each in adapter_arrays(SPEC).items() if "layers.1" in name}
    assert "target_modules names 7 matrices" in refusal(write_adapter(tmp_path / "a", arrays))
    adapter = opened(write_adapter(tmp_path / "b", arrays, layers_to_transform=[1]))
    assert {layer for layer, _ in adapter.parts} == {1}


def test_matrices_that_are_left_out(tmp_path: Path) -> None:
    arrays = {name: each for name, each in adapter_arrays(SPEC).items() if "layers.0.mlp" not in name}
    left_out = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    assert len(opened(write_adapter(tmp_path, arrays, exclude_modules=left_out)).parts) == 11


def test_a_pattern_of_targets_is_answered_by_the_tensors(tmp_path: Path) -> None:
    arrays = adapter_arrays(SPEC, ("q_proj",))
    assert len(opened(write_adapter(tmp_path, arrays, targets=r".*\.q_proj")).parts) == 2


def test_fused_matrices_are_cut(tmp_path: Path) -> None:
    spec = spec_of(config("Phi3ForCausalLM"))
    arrays = adapter_arrays(spec, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
    folder = write_adapter(tmp_path, arrays, targets=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
    adapter = open_adapter(folder, spec, 16)
    whole = arrays[FIRST_B.replace("q_proj", "qkv_proj")] * np.float32(2)
    np.testing.assert_array_equal(adapter.parts[0, "q"].b, whole[:16])
    np.testing.assert_array_equal(adapter.parts[0, "k"].b, whole[16:24])
    np.testing.assert_array_equal(adapter.parts[0, "v"].b, whole[24:])
    assert adapter.parts[1, "up"].b.shape == (20, 4)


def test_the_identity_is_of_the_numbers(tmp_path: Path) -> None:
    arrays = adapter_arrays(SPEC)
    first = opened(write_adapter(tmp_path / "a", arrays)).identity
    again = opened(write_adapter(tmp_path / "b", dict(reversed(arrays.items())), revision="x")).identity
    assert first == again
    assert len(first) == 64
    assert opened(write_adapter(tmp_path / "c", arrays, lora_alpha=9)).identity != first
    changed = arrays | {FIRST_A: arrays[FIRST_A] + np.float32(1e-3)}
    assert opened(write_adapter(tmp_path / "d", changed)).identity != first


def without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {each: array for each, array in arrays.items() if each != name}


def plus(name: str, shape: tuple[int, ...] = (4, 16)) -> Callable[[Arrays], Arrays]:
    return lambda arrays: arrays | {name: np.zeros(shape, np.float32)}


def with_nan(arrays: Arrays) -> Arrays:
    broken = arrays[FIRST_A].copy()
    broken[1, 2] = np.nan
    return arrays | {FIRST_A: broken}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without(FIRST_A), "needs both lora_A and lora_B"),
        (plus(FIRST_A, (4, 17)), r"has the shape \[4, 17\], and rank 4"),
        (plus(FIRST_B, (17, 4)), r"has the shape \[17, 4\]"),
        (plus(FIRST_A.replace("layers.0", "layers.2")), "match no matrix of this model"),
        (plus(FIRST_A.replace("q_proj", "z_proj")), "match no matrix of this model"),
        (plus("base_model.model.lm_head.lora_A.weight"), "match no matrix of this model"),
        (plus("base_model.model.lm_head.weight"), "match no matrix of this model"),
        (plus("base_model.model.model.embed_tokens.lora_embedding_A"), "adapters of embeddings"),
        (plus(FIRST_A.replace("lora_A.weight", "lora_magnitude_vector")), "DoRA cannot be computed"),
        (plus(FIRST_B.replace("weight", "bias"), (16,)), "biases cannot be computed"),
        (plus(f"{PREFIX}model.layers.0.mlp.experts.0.up_proj.lora_A.weight"), "adapters of experts"),
        (plus(FIRST_A.removeprefix(PREFIX)), "are both the same tensor"),
        (with_nan, "not finite"),
        (lambda _: {}, "holds no tensor"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change: Callable[[Arrays], Arrays], says: str) -> None:
    told = refusal(write_adapter(tmp_path, change(adapter_arrays(SPEC))))
    assert re.search(says, told), told


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"peft_type": "LOHA"}, "only LORA is computed"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "saved modules"),
        ({"trainable_token_indices": [1]}, "trained embeddings"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the model's own weights"),
        ({"rank": 8}, "has the shape [4, 20], and rank 8"),
        ({"rank": 32}, "start with --max-lora-rank 32"),
        ({"rank": 0}, "r must be from 1"),
        ({"rank": "4"}, "r must be a whole number"),
        ({"rank": None}, "r is missing"),
        ({"rank_pattern": {"q_proj": 2.5}}, "whole numbers"),
        ({"rank_pattern": {"(a+)+$": 2}}, "must name modules"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"lora_alpha": 3e38}, "not finite"),
        ({"targets": ["q_proj", "lm_head"]}, "no matrix of this model"),
        ({"targets": [3]}, "must name modules"),
    ],
)
def test_descriptions_that_cannot_be_served(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    told = refusal(write_adapter(tmp_path, adapter_arrays(SPEC, size=2.0), **fields))
    assert says in told


def test_missing_and_pickled_files(tmp_path: Path) -> None:
    assert "is not a folder" in refusal(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no adapter_config.json" in refusal(empty)
    folder = write_adapter(tmp_path / "a", adapter_arrays(SPEC))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "only pickled weights (adapter_model.bin)" in refusal(folder)
    (folder / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors" in refusal(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"1234")
    assert "too short" in refusal(folder)
    (folder / "adapter_config.json").write_text("[]")
    assert "must hold a JSON object" in refusal(folder)


def test_links_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", adapter_arrays(SPEC))
    weights = folder / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    assert "leads out of the folder" in refusal(folder)


def test_a_client_names_a_folder_below_the_directory(tmp_path: Path) -> None:
    home = tmp_path / "adapters"
    folder = write_adapter(home / "team" / "a", adapter_arrays(SPEC))
    write_adapter(tmp_path / "outside", adapter_arrays(SPEC))
    (home / "link").symlink_to(tmp_path / "outside")
    (home / "inner").symlink_to(folder)
    assert folder_below(home, "team/a") == folder_below(home, "inner") == folder
    assert folder_below(home, str(folder)) == folder
    for name, says in {
        "../outside": "does not lie below --lora-dir",
        str(tmp_path / "outside"): "does not lie below --lora-dir",
        "link": "does not lie below --lora-dir",
        ".": "does not lie below --lora-dir",
        "": "does not lie below --lora-dir",
        "none": "there is no adapter folder",
        "a\0b": "cannot be read",
    }.items():
        with pytest.raises(InvalidAdapter, match=says):
            folder_below(home, name)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to(tmp_path / "outside" / "adapter_config.json")
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json of 'team/a' is a link"):
        folder_below(home, "team/a")
