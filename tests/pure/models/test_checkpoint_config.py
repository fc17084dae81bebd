"""From config.json to a spec: each architecture's options, both spellings of the rotation, and refusals."""

import math
from typing import Any

import pytest

from paceline.models.files.config_fields import CheckpointError
from paceline.models.spec import RopeSpec
from tests.pure.models.made import LLAMA, config, spec_of


def test_llama() -> None:
    spec = spec_of(LLAMA)
    assert (spec.architecture, spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (
        "llama",
        24,
        16,
        20,
    )
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 4)
    assert spec.max_positions == 64 and spec.windows == (None, None) and spec.norm_eps == 1e-5
    assert spec.ropes == (RopeSpec(rotary_dim=4),) and spec.layer_ropes == (0, 0)
    assert (spec.activation, spec.qkv_bias, spec.output_bias, spec.qk_norm) == ("silu", False, False, False)
    assert (spec.tied_embeddings, spec.experts, spec.norm_offset, spec.embed_scale) == (False, None, 0.0, 1.0)
    assert spec.softmax_scale == 0.5 and spec.bos_token_id == 1 and spec.eos_token_ids == (2,)


def test_llama_options() -> None:
    spec = spec_of(
        config(attention_bias=True, tie_word_embeddings=True, head_dim=8, num_key_value_heads=None)
    )
    assert spec.qkv_bias and spec.output_bias and spec.tied_embeddings
    assert (spec.head_dim, spec.num_kv_heads) == (8, 4)


@pytest.mark.parametrize("window, expected", [(None, None), (16, 16)])
@pytest.mark.parametrize("name", ["MistralForCausalLM", "Phi3ForCausalLM"])
def test_one_window_for_all_layers(name: str, window: int | None, expected: int | None) -> None:
    assert spec_of(config(name, sliding_window=window)).windows == (expected,) * 2


def test_mistral_has_a_window_unless_it_is_ruled_out() -> None:
    assert spec_of(config("MistralForCausalLM")).windows == (4096, 4096)
    assert spec_of(config("Phi3ForCausalLM")).windows == (None, None)


def test_qwen2_windows() -> None:
    window = {"sliding_window": 16, "max_window_layers": 1}
    assert spec_of(config("Qwen2ForCausalLM", **window)).windows == (None, None)
    spec = spec_of(config("Qwen2ForCausalLM", use_sliding_window=True, **window))
    assert spec.windows == (None, 16) and spec.layer_ropes == (0, 0)
    assert spec.qkv_bias and not spec.output_bias and not spec.qk_norm
    types = ["sliding_attention", "full_attention"]
    assert spec_of(
        config("Qwen2ForCausalLM", use_sliding_window=True, layer_types=types, **window)
    ).windows == (16, None)
    assert spec_of(config("Qwen2ForCausalLM", layer_types=types, **window)).windows == (None, None)


def test_qwen3() -> None:
    spec = spec_of(config("Qwen3ForCausalLM"))
    assert spec.qk_norm and spec.head_dim == 128 and not spec.qkv_bias
    assert spec_of(config("Qwen3ForCausalLM", attention_bias=True)).output_bias


def test_gemma3() -> None:
    spec = spec_of(
        config("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=16, query_pre_attn_scalar=64)
    )
    assert spec.windows == (16, 16, 16, 16, 16, None, 16)
    assert spec.ropes == (RopeSpec(rotary_dim=256), RopeSpec(rotary_dim=256, theta=1e6))
    assert spec.layer_ropes == (0, 0, 0, 0, 0, 1, 0)
    assert (spec.norm_offset, spec.embed_scale, spec.attention_scale) == (1.0, 4.0, 0.125)
    assert spec.activation == "gelu_tanh" and spec.sandwich_norms and spec.qk_norm and spec.tied_embeddings
    pattern = spec_of(
        config("Gemma3ForCausalLM", num_hidden_layers=4, sliding_window=16, sliding_window_pattern=2)
    )
    assert pattern.windows == (16, None, 16, None)


def test_gemma3_as_its_makers_write_it() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = spec_of(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    )
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262_208, 8, 4, 256)
    assert spec.max_positions == 131_072 and spec.eos_token_ids == (1, 106) and spec.bos_token_id == 2
    local, full = spec.ropes
    assert (local.kind, local.theta) == ("default", 10_000.0)
    assert (full.kind, full.factor, full.theta) == ("linear", 8.0, 1e6)
    assert spec.windows.count(None) == 5 and spec.layer_groups[5] == 0


@pytest.mark.parametrize("field", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_gemma3_soft_caps_are_refused(field: str) -> None:
    assert spec_of(config("Gemma3ForCausalLM", **{field: None}))
    with pytest.raises(CheckpointError, match=f"config.json: {field} is set"):
        spec_of(config("Gemma3ForCausalLM", **{field: 30.0}))


def test_phi3_turns_a_part_of_each_head() -> None:
    spec = spec_of(config("Phi3ForCausalLM", hidden_size=32, partial_rotary_factor=0.5))
    assert spec.ropes == (RopeSpec(rotary_dim=4),) and spec.head_dim == 8
    new = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.25}
    assert spec_of(config("Phi3ForCausalLM", hidden_size=32, rope_parameters=new)).ropes[0].rotary_dim == 2


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_long_context_is_refused(kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0}
    with pytest.raises(CheckpointError, match="longrope|long-context"):
        spec_of(config("Phi3ForCausalLM", rope_scaling=scaling))


def test_mixtral() -> None:
    spec = spec_of(config("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2))
    assert spec.experts is not None and spec.ropes[0].theta == 1e6
    assert (spec.experts.num_experts, spec.experts.per_token, spec.experts.intermediate_size) == (4, 2, 20)
    assert spec.experts.normalize and spec.experts.layers == (0, 1)


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts"])
def test_qwen3_moe(count: str) -> None:
    more: dict[str, Any] = {count: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 4}
    spec = spec_of(config("Qwen3MoeForCausalLM", num_hidden_layers=6, **more))
    assert spec.experts is not None and not spec.experts.normalize
    assert spec.experts.layers == tuple(range(6)) and spec.experts.intermediate_size == 6
    more |= {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
    spec = spec_of(config("Qwen3MoeForCausalLM", num_hidden_layers=6, **more))
    assert spec.experts is not None and spec.experts.layers == (1, 5) and spec.experts.normalize
    window = {"use_sliding_window": True, "sliding_window": 8}
    assert spec_of(config("Qwen3MoeForCausalLM", **more, **window)).windows == (8, 8)


# ---------------------------------------------------------------- rotation


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES: list[tuple[dict[str, Any], RopeSpec]] = [
    ({"rope_type": "default"}, RopeSpec(rotary_dim=4, theta=500.0)),
    ({"type": "linear", "factor": 2}, RopeSpec(rotary_dim=4, theta=500.0, kind="linear", factor=2.0)),
    (
        {"type": "dynamic", "factor": 2.0},
        RopeSpec(rotary_dim=4, theta=500.0, kind="dynamic", factor=2.0, trained_positions=64),
    ),
    (LLAMA3, RopeSpec(rotary_dim=4, theta=500.0, kind="llama3", factor=8.0, trained_positions=32)),
    (
        {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16,
            "truncate": False,
        },
        RopeSpec(
            rotary_dim=4,
            theta=500.0,
            kind="yarn",
            factor=4.0,
            trained_positions=32,
            beta_fast=16.0,
            truncate=False,
            attention_factor=0.1 * math.log(4) + 1,
        ),
    ),
]


@pytest.mark.parametrize("fields, expected", ROPES)
def test_both_spellings_of_the_rotation_are_one(fields: dict[str, Any], expected: RopeSpec) -> None:
    assert spec_of(config(rope_theta=500.0, rope_scaling=fields)).ropes == (expected,)
    assert spec_of(config(rope_parameters={**fields, "rope_theta": 500.0})).ropes == (expected,)


def yarn(**more: Any) -> RopeSpec:
    return spec_of(config(rope_scaling={"rope_type": "yarn", "factor": 4.0, **more})).ropes[0]


def test_what_yarn_multiplies_with() -> None:
    assert yarn(attention_factor=0.75).attention_factor == 0.75
    expected = (0.1 * 0.7 * math.log(4) + 1) / (0.1 * 0.5 * math.log(4) + 1)
    assert yarn(mscale=0.7, mscale_all_dim=0.5).attention_factor == pytest.approx(expected)
    assert yarn(mscale=0.7).attention_factor == yarn().attention_factor
    assert yarn(factor=1.0).attention_factor == 1.0
    from_lengths = yarn(factor=None, original_max_position_embeddings=16)
    assert from_lengths.factor == 4.0 and from_lengths.trained_positions == 16


def test_how_long_a_stretched_model_reaches() -> None:
    assert spec_of(config(rope_scaling={"type": "linear", "factor": 2.0})).max_positions == 128
    assert spec_of(config(rope_scaling={"type": "dynamic", "factor": 3.0})).max_positions == 192
    assert spec_of(config(rope_scaling=LLAMA3)).max_positions == 64
    short = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert spec_of(config(rope_scaling=short)).max_positions == 256
    assert spec_of(config(rope_scaling={"type": "linear", "factor": 1e300})).max_positions == 2**31 - 1


def test_a_rotation_per_kind_of_layer() -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    }
    types = ["sliding_attention", "full_attention"]
    spec = spec_of(config("Gemma3ForCausalLM", rope_parameters=ropes, layer_types=types, head_dim=4))
    assert spec.ropes == (
        RopeSpec(rotary_dim=4, theta=7.0),
        RopeSpec(rotary_dim=4, theta=1e6, kind="linear", factor=8.0),
    )
    assert spec.layer_ropes == (0, 1)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "name",
    [name for name in LLAMA if name.endswith("size") or name.startswith(("num", "max"))],
)
@pytest.mark.parametrize("value", ["x", 0, -1, 1.5, True, 10**12, [], {}])
def test_sizes_out_of_range_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {name} must be"):
        spec_of(config(**{name: value}))


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"]
)
def test_a_missing_field_is_named(name: str) -> None:
    values = config()
    del values[name]
    with pytest.raises(CheckpointError, match=f"^config.json: {name} is missing$"):
        spec_of(values)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_key_value_heads of 3 does not divide", {"num_key_value_heads": 3}),
    ("hidden_act 'relu' is not supported; supported are silu", {"hidden_act": "relu"}),
    ("mlp_bias is true", {"mlp_bias": True}),
    ("rms_norm_eps must be a finite number above 0", {"rms_norm_eps": 0}),
    ("eos_token_id must be a token id or a list", {"eos_token_id": ["</s>"]}),
    ("eos_token_id must be a token id or a list", {"eos_token_id": []}),
    ("bos_token_id must be a token id or a list", {"bos_token_id": -1}),
    ("rope_scaling must be a group of fields", {"rope_scaling": "yarn"}),
    (
        "rope_scaling: rope_type 'ntk' is not supported; supported are default",
        {"rope_scaling": {"type": "ntk"}},
    ),
    ("rope_scaling: rope_type longrope is not supported", {"rope_scaling": {"rope_type": "longrope"}}),
    ("rope_scaling: factor is missing", {"rope_scaling": {"type": "linear"}}),
    ("rope_scaling: low_freq_factor is missing", {"rope_scaling": {**LLAMA3, "low_freq_factor": None}}),
    ("rope_theta must be a finite number above 0", {"rope_theta": -1.0}),
    ("partial_rotary_factor of 0.7 turns", {"hidden_size": 40, "partial_rotary_factor": 0.7}),
    ("partial_rotary_factor of 1.5 turns", {"partial_rotary_factor": 1.5}),
    ("tie_word_embeddings must be true or false", {"tie_word_embeddings": "yes"}),
]


@pytest.mark.parametrize("told, changes", REFUSED)
def test_what_cannot_be_is_refused(told: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {told}"):
        spec_of(config(**changes))


def test_layer_types_must_fit() -> None:
    for types in (["full_attention"], ["full_attention", "linear_attention"]):
        with pytest.raises(CheckpointError, match="layer_types must be 2 times"):
            spec_of(config("Gemma3ForCausalLM", layer_types=types))


def test_too_many_experts_are_refused_before_they_are_counted() -> None:
    with pytest.raises(CheckpointError, match="num_local_experts must be from 1 to 128"):
        spec_of(
            config(
                "MixtralForCausalLM", num_hidden_layers=1024, num_local_experts=1000, num_experts_per_tok=2
            )
        )


@pytest.mark.parametrize(
    ("architectures", "says"),
    [
        (None, "names no architecture, so how to compute the model is not known"),
        ([], "names no architecture, so how to compute the model is not known"),
        (["GPT2LMHeadModel"], "architectures: 'GPT2LMHeadModel' is not supported"),
        ("LlamaForCausalLM", "architectures must be a list of names, not 'LlamaForCausalLM'"),
        ([3], "architectures: 3 is not supported"),
        ([["x"]], "is not supported"),
    ],
)
def test_an_unknown_architecture_lists_what_is_supported(architectures: object, says: str) -> None:
    with pytest.raises(CheckpointError, match=f"{says}; supported are .*Gemma3ForCausalLM, .*Qwen3Moe"):
        spec_of(config() | {"architectures": architectures})


def test_a_missing_architecture_is_suggested_by_the_model_type() -> None:
    with pytest.raises(
        CheckpointError, match=r"model_type 'qwen3' suggests .*\[\"Qwen3ForCausalLM\"\]; supported"
    ):
        spec_of(config() | {"architectures": None, "model_type": "qwen3"})
