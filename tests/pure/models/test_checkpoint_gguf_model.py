"""GGUF files as models: specs per architecture, and tensors put back to their names, parts and order."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.open import Checkpoint, llama3_factors, open_checkpoint
from paceline.models.files.sampling_defaults import FALLBACK, GenerationDefaults
from paceline.models.files.stored import StoredTensor
from paceline.models.files.tensor_layout import Piece
from paceline.models.spec import RopeSpec
from tests.pure.models.made import (
    Arrays,
    Gguf,
    arrays_for,
    config,
    gguf_fields,
    interleaved,
    renamed,
    spec_of,
)


def opened(tmp_path: Path, fields: dict[str, object], arrays: Arrays) -> Checkpoint:
    path = tmp_path / "model.gguf"
    path.write_bytes(Gguf(fields=fields, arrays=arrays).build())
    return open_checkpoint(path)


def assert_holds(checkpoint: Checkpoint, arrays: Arrays) -> None:
    assert checkpoint.names() == frozenset(arrays)
    for name, expected in arrays.items():
        tensor = checkpoint.tensor(name)
        assert tensor.shape == expected.shape and not tensor.raw.flags.writeable, name
        assert np.array_equal(tensor.to_float32(), expected), name


ARCHITECTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaForCausalLM", {}),
    ("llama", "LlamaForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen2", "Qwen2ForCausalLM", {}),
    ("qwen3", "Qwen3ForCausalLM", {"head_dim": 8}),
    ("gemma3", "Gemma3ForCausalLM", {"head_dim": 8}),
]


@pytest.mark.parametrize("architecture, model, options", ARCHITECTURES)
def test_a_dense_model(tmp_path: Path, architecture: str, model: str, options: dict[str, Any]) -> None:
    spec = spec_of(config(model, **options))
    arrays = arrays_for(spec)
    stored = renamed(arrays, spec, interleave=architecture == "llama")
    checkpoint = opened(tmp_path, gguf_fields(architecture, spec), stored)
    assert_holds(checkpoint, arrays)
    found = checkpoint.spec
    assert found.architecture == spec.architecture and found.tied_embeddings == spec.tied_embeddings
    for name in ("vocab_size", "num_layers", "num_kv_heads", "head_dim", "max_positions", "activation"):
        assert getattr(found, name) == getattr(spec, name), name
    for name in ("qkv_bias", "output_bias", "qk_norm", "sandwich_norms", "embed_scale", "eos_token_ids"):
        assert getattr(found, name) == getattr(spec, name), name
    assert found.norm_offset == 0.0 and found.norm_eps == pytest.approx(spec.norm_eps)
    assert checkpoint.kind == "gguf" and checkpoint.text.gguf_fields is not None


def test_sampling_out_of_the_fields(tmp_path: Path) -> None:
    spec = spec_of(config("LlamaForCausalLM"))
    fields = gguf_fields("llama", spec)
    stored = renamed(arrays_for(spec), spec, interleave=True)
    assert opened(tmp_path, fields, stored).generation == FALLBACK
    fields |= {"general.sampling.temp": 0.6, "general.sampling.top_p": 0.95, "general.sampling.top_k": 20}
    fields |= {"general.sampling.penalty_repeat": 1.1}
    assert opened(tmp_path, fields, stored).generation == GenerationDefaults(
        sampling={"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    )
    fields["general.sampling.temp"] = -1.0
    with pytest.raises(CheckpointError, match=r"general.sampling: temperature must be a finite number"):
        opened(tmp_path, fields, stored)


def test_gemma3_layers(tmp_path: Path) -> None:
    spec = spec_of(config("Gemma3ForCausalLM", head_dim=8, num_hidden_layers=7, rope_theta=1e6))
    stored = renamed(arrays_for(spec), spec, interleave=False)
    # Theta of the full layers is the file's; the fields are those of a real file.
    fields = gguf_fields("gemma3", spec, attention__sliding_window=16, rope__freq_base=1e6)
    fields |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    found = opened(tmp_path, fields, stored).spec
    assert found.windows == (16, 16, 16, 16, 16, None, 16) and found.layer_ropes == (0, 0, 0, 0, 0, 1, 0)
    assert found.ropes[0] == RopeSpec(rotary_dim=8, theta=10_000.0)
    assert found.ropes[1] == RopeSpec(rotary_dim=8, theta=1e6, kind="linear", factor=8.0)
    assert found.attention_scale == 8**-0.5 and found.max_positions == 64
    fields["gemma3.attention.sliding_window_pattern"] = [True, False, True, True, True, True, True]
    assert opened(tmp_path, fields, stored).spec.windows == (16, None, 16, 16, 16, 16, 16)


def test_phi3_is_cut_into_its_parts(tmp_path: Path) -> None:
    spec = spec_of(config("Phi3ForCausalLM"))
    arrays = arrays_for(spec)
    stored = renamed(arrays, spec, interleave=False)
    for layer in (0, 1):
        blk = f"blk.{layer}."
        stored[f"{blk}attn_qkv.weight"] = np.concatenate([stored.pop(f"{blk}attn_{p}.weight") for p in "qkv"])
        gate, up = stored.pop(f"{blk}ffn_gate.weight"), stored.pop(f"{blk}ffn_up.weight")
        stored[f"{blk}ffn_up.weight"] = np.concatenate([gate, up])
    fields = gguf_fields("phi3", spec, attention__sliding_window=16, rope__dimension_count=2)
    checkpoint = opened(tmp_path, fields, stored)
    assert_holds(checkpoint, arrays)
    assert checkpoint.spec.windows == (16, 16) and checkpoint.spec.ropes[0].rotary_dim == 2
    stored["rope_factors_long.weight"] = np.ones(2, np.float32)
    with pytest.raises(CheckpointError, match="long-context factors"):
        opened(tmp_path, fields, stored)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_experts(tmp_path: Path, architecture: str, stacked: bool) -> None:
    options: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 2}
    model = "MixtralForCausalLM"
    if architecture == "qwen3moe":
        model = "Qwen3MoeForCausalLM"
        options |= {"moe_intermediate_size": 6, "head_dim": 8, "mlp_only_layers": [1]}
    spec = spec_of(config(model, **options))
    arrays = arrays_for(spec)
    stored = renamed(arrays, spec, interleave=architecture == "llama")
    for layer in range(spec.num_layers):
        if not spec.has_experts(layer):
            continue
        for part in ("gate", "up", "down"):
            own = f"model.layers.{layer}.mlp.experts."
            each = [stored.pop(f"{own}{expert}.{part}_proj.weight") for expert in range(3)]
            if stacked:
                stored[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack(each)
            else:
                stored |= {f"blk.{layer}.ffn_{part}.{expert}.weight": one for expert, one in enumerate(each)}
    fields = gguf_fields(architecture, spec, expert_count=3, expert_used_count=2)
    if architecture == "qwen3moe":
        fields["qwen3moe.expert_feed_forward_length"] = 6
    checkpoint = opened(tmp_path, fields, stored)
    assert_holds(checkpoint, arrays)
    found, expected = checkpoint.spec.experts, spec.experts
    assert found is not None and expected is not None and checkpoint.spec.architecture == spec.architecture
    assert (found.num_experts, found.per_token, found.layers) == (3, 2, expected.layers)
    assert found.intermediate_size == expected.intermediate_size and found.normalize


def test_the_order_of_rows_is_undone_on_quantised_bytes() -> None:
    values = np.random.default_rng(0).standard_normal((16, 64), np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    plain, stored = gguf.quants.quantize(values, kind), gguf.quants.quantize(interleaved(values, 2), kind)
    tensor = StoredTensor(
        name="q", shape=(16, 64), dtype="Q4_1", raw=stored.reshape(-1), decode=lambda tensor: values
    )
    found = Piece(source="q", interleaved_heads=2).cut("name", tensor)
    assert np.array_equal(found.raw.reshape(plain.shape), plain) and found.dtype == "Q4_1"


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    """Opens a small llama file with changed fields and tensors."""
    spec = spec_of(config(tie_word_embeddings=True, rope_theta=10_000.0))
    arrays = renamed(arrays_for(spec), spec, interleave=True)

    def build(fields: dict[str, object] | None = None, **tensors: NDArray[np.float32]) -> Checkpoint:
        merged = {**gguf_fields("llama", spec), **(fields or {})}
        more = {name.replace("__", "."): array for name, array in tensors.items()}
        return opened(tmp_path, {k: v for k, v in merged.items() if v is not None}, {**arrays, **more})

    return build


def test_llama3_factors_are_recognised(llama: Any) -> None:
    theta, dim = 10_000.0, 4
    factors = llama3_factors(theta, dim, 32.0, 8192).astype(np.float32)
    # With so few entries none would be stretched; a theta with long waves stretches the second.
    assert factors.tolist() == [1.0, 1.0]
    fields: dict[str, object] = {"llama.rope.freq_base": 1e9}
    factors = llama3_factors(1e9, dim, 32.0, 8192).astype(np.float32)
    assert factors.tolist() == [1.0, 32.0]
    rope = llama(fields, rope_freqs__weight=factors).spec.ropes[0]
    assert (rope.kind, rope.factor, rope.trained_positions) == ("llama3", 32.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


@pytest.mark.parametrize("factors", [[2.0, 3.0], [1.0], [1.0, float("inf")], [0.5, 0.5], [float("nan"), 1.0]])
def test_other_factors_are_refused(llama: Any, factors: list[float]) -> None:
    with pytest.raises(CheckpointError, match="rope_freqs.weight holds factors that are not Llama 3's"):
        llama(rope_freqs__weight=np.array(factors, np.float32))


def test_llama3_factors_follow_the_wavelength() -> None:
    trained = 8192
    factors = llama3_factors(500_000.0, 64, 8.0, trained)
    wavelength = 2 * np.pi * 500_000.0 ** (np.arange(0, 64, 2) / 64)
    assert (factors[wavelength < trained / 4] == 1).all() and (factors[wavelength > trained] == 8).all()
    between = factors[(wavelength > trained / 4) & (wavelength < trained)]
    assert between.size and ((between > 1) & (between < 8)).all() and (np.diff(factors) >= 0).all()


def test_stretched_rotations(llama: Any) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert llama(linear).spec.ropes[0] == RopeSpec(rotary_dim=4, kind="linear", factor=4.0)
    assert llama({"llama.rope.scale_linear": 2.0}).spec.ropes[0].factor == 2.0
    yarn = {**linear, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 16}
    rope = llama(yarn).spec.ropes[0]
    assert (rope.kind, rope.trained_positions) == ("yarn", 16)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    with pytest.raises(CheckpointError, match="rope.scaling.type 'longrope' is not supported"):
        llama({"llama.rope.scaling.type": "longrope"})


def test_text_fields(llama: Any) -> None:
    fields: dict[str, object] = {
        "tokenizer.chat_template": "one",
        "tokenizer.chat_template.tool_use": "two",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    checkpoint = llama(fields)
    text = checkpoint.text
    assert text.chat_templates == {"default": "one", "tool_use": "two"} and text.chat_template == "one"
    assert (text.add_bos, text.add_eos) == (False, None) and checkpoint.spec.eos_token_ids == (2, 7)
    assert text.gguf_fields["tokenizer.ggml.tokens"] == ["a", "b"]


REFUSED: list[tuple[str, dict[str, object]]] = [
    ("general.architecture 'mamba' is not supported; supported are llama", {"general.architecture": "mamba"}),
    ("general.architecture is missing", {"general.architecture": None}),
    ("split.count says that this is one of several parts", {"split.count": 3}),
    ("llama: block_count is missing", {"llama.block_count": None}),
    ("llama: attention.head_count must be a whole number", {"llama.attention.head_count": [4, 4]}),
    ("attention.head_count_kv of 3 does not divide", {"llama.attention.head_count_kv": 3}),
    ("attention.value_length differs from", {"llama.attention.value_length": 8}),
    ("rope.dimension_count of 2 is not supported", {"llama.rope.dimension_count": 2}),
    ("final_logit_softcapping is set", {"llama.final_logit_softcapping": 30.0}),
    ("expert_count must be from 0 to", {"llama.expert_count": 10**6}),
    (
        "attention.layer_norm_rms_epsilon must be a finite",
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    ),
]


@pytest.mark.parametrize("told, fields", REFUSED)
def test_what_cannot_be_is_refused(llama: Any, told: str, fields: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=f"model.gguf: .*{told}" if told.startswith("llama") else told):
        llama(fields)


def test_tensors_that_do_not_fit_are_one_error(llama: Any) -> None:
    with pytest.raises(
        CheckpointError, match="1 of another shape: output_norm.weight .*1 not part of the model: x"
    ):
        llama(output_norm__weight=np.zeros(3, np.float32), x=np.zeros(1, np.float32))


def test_a_file_without_an_embedding_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no token_embd.weight"):
        opened(tmp_path, gguf_fields("llama", spec_of(config())), {})


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path, llama: Any) -> None:
    llama()
    assert open_checkpoint(tmp_path).path == tmp_path / "model.gguf"
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has no config.json"):
        open_checkpoint(tmp_path)
