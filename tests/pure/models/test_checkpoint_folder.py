"""Hugging Face folders: what is read, what is refused, and that nothing outside the folder is touched."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.open import open_checkpoint
from paceline.models.files.sampling_defaults import FALLBACK, GenerationDefaults
from tests.pure.models.made import LLAMA, Arrays, arrays_for, config, packed, spec_of, write_folder


@pytest.fixture
def arrays() -> Arrays:
    return arrays_for(spec_of(LLAMA))


def test_every_tensor_of_a_plain_folder(tmp_path: Path, arrays: Arrays) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, LLAMA, arrays))
    assert checkpoint.names() == frozenset(arrays) and checkpoint.kind == "safetensors"
    for name, values in arrays.items():
        tensor = checkpoint.tensor(name)
        assert tensor.name == name and tensor.shape == values.shape
        assert np.array_equal(tensor.to_float32(), values)
    assert checkpoint.stored["F32"].num_tensors == len(arrays)
    assert checkpoint.stored["F32"].num_bytes == sum(values.nbytes for values in arrays.values())


def shard(folder: Path, arrays: Arrays, **index: Any) -> Path:
    write_folder(folder, LLAMA, arrays)
    (folder / "model.safetensors").unlink()
    names = sorted(arrays)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        (folder / file).write_bytes(packed({name: arrays[name] for name in part}))
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | index}))
    return folder


def test_a_sharded_folder(tmp_path: Path, arrays: Arrays) -> None:
    checkpoint = open_checkpoint(shard(tmp_path, arrays))
    for name, values in arrays.items():
        assert np.array_equal(checkpoint.tensor(name).to_float32(), values)


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "..\\a.safetensors", "a.bin", 3, "."],
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, arrays: Arrays, name: object) -> None:
    (tmp_path / "a.safetensors").write_bytes(packed(arrays))
    with pytest.raises(CheckpointError, match="index.json: weight_map names .*, not a .safetensors file in"):
        open_checkpoint(shard(tmp_path / "model", arrays, extra=name))


def test_an_index_that_names_a_missing_file(tmp_path: Path, arrays: Arrays) -> None:
    with pytest.raises(CheckpointError, match="names c.safetensors, which is not there"):
        open_checkpoint(shard(tmp_path, arrays, extra="c.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map must say"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, arrays: Arrays, file: str) -> None:
    folder = write_folder(tmp_path / "model", LLAMA, arrays)
    (folder / file).rename(tmp_path / "elsewhere")
    (folder / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{file}: is a link that leads out of the folder"):
        open_checkpoint(folder)


def test_a_link_inside_the_folder_and_to_the_folder_is_fine(tmp_path: Path, arrays: Arrays) -> None:
    folder = write_folder(tmp_path / "model", LLAMA, arrays)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    (tmp_path / "alias").symlink_to(folder)
    assert open_checkpoint(tmp_path / "alias").names() == frozenset(arrays)


def cached(tmp_path: Path, blobs: Path, arrays: Arrays) -> Path:
    """A snapshot as the hub's cache lays it out, its files links into `blobs`."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    write_folder(snapshot, LLAMA, arrays)
    blobs.mkdir(parents=True)
    for file in list(snapshot.iterdir()):
        file.rename(blobs / f"blob-{file.name}")
        file.symlink_to(blobs / f"blob-{file.name}")
    return snapshot


@pytest.mark.parametrize("blobs", ["models--org--name/blobs", "blobs/ab"])
def test_a_snapshot_may_link_to_the_blobs_of_its_cache(tmp_path: Path, arrays: Arrays, blobs: str) -> None:
    assert open_checkpoint(cached(tmp_path, tmp_path / blobs, arrays)).names() == frozenset(arrays)


@pytest.mark.parametrize("blobs", ["models--org--other/blobs", "elsewhere", "blobs/ab/cd"])
def test_a_snapshot_may_not_link_elsewhere(tmp_path: Path, arrays: Arrays, blobs: str) -> None:
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        open_checkpoint(cached(tmp_path, tmp_path / blobs, arrays))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened(tmp_path: Path, file: str) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    with pytest.raises(
        CheckpointError, match=rf"pickled weights \({file}\).*never opened; convert.*safetensors"
    ):
        open_checkpoint(tmp_path)


def test_no_weights_and_no_config(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        open_checkpoint(tmp_path / "absent")


def test_all_that_does_not_fit_is_one_error(tmp_path: Path, arrays: Arrays) -> None:
    missing = [
        f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in (0, 1) for part in ("gate", "up", "down")
    ]
    for name in missing:
        del arrays[name]
    arrays["model.norm.weight"] = np.zeros(17, np.float32)
    arrays["model.layers.2.input_layernorm.weight"] = np.zeros(16, np.float32)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write_folder(tmp_path, LLAMA, arrays))
    told = str(caught.value)
    assert "6 missing: model.layers.0.mlp.gate_proj.weight" in told and "and 2 more" in told
    assert "1 of another shape: model.norm.weight [17] (for model.norm.weight [16])" in told
    assert "1 not part of the model: model.layers.2.input_layernorm.weight" in told


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    tied = config(tie_word_embeddings=True)
    arrays = arrays_for(spec_of(tied))
    names = frozenset(arrays)
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    arrays["model.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    arrays["lm_head.weight"] = np.zeros((24, 16), np.float32)
    assert open_checkpoint(write_folder(tmp_path / "tied", tied, arrays)).names() == names


def test_a_head_of_its_own_is_needed_where_it_is_not_tied(tmp_path: Path, arrays: Arrays) -> None:
    del arrays["lm_head.weight"]
    with pytest.raises(CheckpointError, match="1 missing: lm_head.weight"):
        open_checkpoint(write_folder(tmp_path, LLAMA, arrays))


def test_a_fused_model_is_cut_into_its_parts(tmp_path: Path) -> None:
    values = config("Phi3ForCausalLM")
    whole = arrays_for(spec_of(values))
    stored = dict(whole)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}."
        parts = [stored.pop(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv"]
        stored[f"{prefix}self_attn.qkv_proj.weight"] = np.concatenate(parts)
        parts = [stored.pop(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")]
        stored[f"{prefix}mlp.gate_up_proj.weight"] = np.concatenate(parts)
    checkpoint = open_checkpoint(write_folder(tmp_path, values, stored))
    for name, expected in whole.items():
        assert np.array_equal(checkpoint.tensor(name).to_float32(), expected), name
    stored["model.layers.0.self_attn.qkv_proj.weight"] = np.zeros((30, 16), np.float32)
    with pytest.raises(
        CheckpointError, match=re.escape("3 of another shape: model.layers.0.self_attn.qkv_proj")
    ):
        open_checkpoint(write_folder(tmp_path, values, stored))


def split_experts(stored: Arrays) -> None:
    for name in [name for name in stored if ".mlp." in name]:
        renamed = name.replace(".mlp.", ".block_sparse_moe.")
        for part, short in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            renamed = renamed.replace(part, short)
        stored[renamed] = stored.pop(name)


def stack_experts(stored: Arrays, prefix: str) -> None:
    for layer in (0, 1):
        own = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: [stored.pop(f"{own}{e}.{part}_proj.weight") for e in range(4)]
            for part in ("gate", "up", "down")
        }
        stack = f"model.layers.{layer}.{prefix}.experts."
        pairs = zip(parts["gate"], parts["up"], strict=True)
        stored[f"{stack}gate_up_proj"] = np.stack([np.concatenate(pair) for pair in pairs])
        stored[f"{stack}down_proj"] = np.stack(parts["down"])


@pytest.mark.parametrize("spelling", ["plain", "w1 w2 w3", "stacked", "stacked in block_sparse_moe"])
def test_experts_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    values = config("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)
    whole = arrays_for(spec_of(values))
    stored = dict(whole)
    if spelling == "w1 w2 w3":
        split_experts(stored)
    elif spelling.startswith("stacked"):
        stack_experts(stored, "block_sparse_moe" if "block" in spelling else "mlp")
    checkpoint = open_checkpoint(write_folder(tmp_path, values, stored))
    for name, expected in whole.items():
        assert np.array_equal(checkpoint.tensor(name).to_float32(), expected), name


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
)
def test_a_language_model_beside_a_vision_model(tmp_path: Path, rename: Any) -> None:
    text = {name: value for name, value in LLAMA.items() if name != "architectures"}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**text, "head_dim": 8}}
    whole = arrays_for(spec_of(values))
    stored = {rename(name): array for name, array in whole.items()}
    stored["vision_tower.patch.weight"] = np.zeros(3, np.float32)
    stored["model.multi_modal_projector.norm"] = np.zeros(3, np.float32)
    checkpoint = open_checkpoint(write_folder(tmp_path, values, stored))
    for name, expected in whole.items():
        assert np.array_equal(checkpoint.tensor(name).to_float32(), expected), name


def test_two_names_for_one_tensor(tmp_path: Path, arrays: Arrays) -> None:
    arrays["language_model.model.norm.weight"] = np.zeros(16, np.float32)
    with pytest.raises(CheckpointError, match="are both the tensor model.norm.weight"):
        open_checkpoint(write_folder(tmp_path, LLAMA, arrays))


def test_generation_defaults_and_ends(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    generation = {"eos_token_id": [5, 6, 5], "bos_token_id": 3, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"do_sample": True}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec.eos_token_ids == (5, 6) and checkpoint.spec.bos_token_id == 3
    found = checkpoint.generation
    assert found.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 20} and found.do_sample is True
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(
        CheckpointError, match="generation_config.json: temperature must be a number, not 'hot'"
    ):
        open_checkpoint(tmp_path)


def test_a_folder_without_generation_config_has_the_default_for_models_that_recommend_nothing(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path, LLAMA)
    assert open_checkpoint(tmp_path).generation == FALLBACK
    assert open_checkpoint(tmp_path, load_format="dummy").generation == GenerationDefaults()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert open_checkpoint(tmp_path).generation == GenerationDefaults(), "as in vLLM: absent is neutral"


def test_chat_templates_in_every_place(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    assert open_checkpoint(tmp_path).text.chat_template is None
    tokenizer_config = tmp_path / "tokenizer_config.json"
    tokenizer_config.write_text('{"chat_template": "one", "add_bos_token": true, "bos_token": "<s>"}')
    text = open_checkpoint(tmp_path).text
    assert (text.chat_template, text.add_bos, text.add_eos) == ("one", True, None)
    assert text.tokenizer_config["bos_token"] == "<s>" and text.tokenizer_json is None
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    tokenizer_config.write_text(json.dumps({"chat_template": named}))
    text = open_checkpoint(tmp_path).text
    assert text.chat_template == "two" and text.chat_templates["tool_use"] == "three"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "four"}')
    assert open_checkpoint(tmp_path).text.chat_template == "four"
    (tmp_path / "chat_template.jinja").write_text("fünf")
    (tmp_path / "tokenizer.json").write_text("{}")
    text = open_checkpoint(tmp_path).text
    assert text.chat_template == "fünf" and text.chat_templates["tool_use"] == "three"
    assert text.tokenizer_json == tmp_path / "tokenizer.json"
    tokenizer_config.write_text('{"chat_template": [3]}')
    with pytest.raises(CheckpointError, match="chat_template must be a text or a list"):
        open_checkpoint(tmp_path)


def test_made_up_weights_need_a_config_only_and_are_always_the_same(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    first, second = (open_checkpoint(tmp_path, load_format="dummy") for _ in range(2))
    assert first.kind == "dummy" and first.names() == frozenset(arrays_for(first.spec))
    values = first.tensor("model.embed_tokens.weight").to_float32()
    assert np.array_equal(values, second.tensor("model.embed_tokens.weight").to_float32())
    assert 0.015 < values.std() < 0.025
    assert not np.array_equal(values, first.tensor("lm_head.weight").to_float32())
    assert (first.tensor("model.norm.weight").to_float32() == 1).all()


def test_made_up_norms_of_gemma_add_up_to_one(tmp_path: Path) -> None:
    write_folder(tmp_path, config("Gemma3ForCausalLM", head_dim=8))
    checkpoint = open_checkpoint(tmp_path, load_format="dummy")
    assert (checkpoint.tensor("model.layers.0.self_attn.q_norm.weight").to_float32() == 0).all()


def test_formats_that_do_not_fit_the_path(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    with pytest.raises(CheckpointError, match="is a folder; for the format gguf give"):
        open_checkpoint(tmp_path, load_format="gguf")
    with pytest.raises(CheckpointError, match="is a file; for the format safetensors give"):
        open_checkpoint(tmp_path / "model.safetensors", load_format="safetensors")
    with pytest.raises(CheckpointError, match="load format 'pickle' is not one of auto"):
        open_checkpoint(tmp_path, load_format="pickle")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="model.gguf: cannot be read: it is not a file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_path_that_no_file_can_have() -> None:
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        open_checkpoint("x" * 5_000)
