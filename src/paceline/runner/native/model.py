"""A model ready for the CPU step: its panels, small tensors and the table of layers that the kernels read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Context, Decimal

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.stored import StoredTensor, TensorSource, check_finite
from paceline.models.spec import ModelSpec, RopeSpec, model_work
from paceline.runner.native.arena import Arena, Matrix, build_arena, kinds_of, matrix_names
from paceline.runner.native.checks import Range
from paceline.runner.native.layout import (
    COLUMNS,
    EXPERT,
    GELU,
    GELU_TANH,
    GROUP,
    KINDS,
    LAYER,
    Q8_FINE,
    QUANTISED,
    SILU,
    SUB_BLOCK,
)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Index = NDArray[np.int64]

_AT_ONCE = 256  # positions, whose numbers stay in a near cache
_TERMS = 9  # of the series; the angle is at most an eighth of a turn
# pi / 2 = the sum of these, the first two with 33 bits
_QUARTER_TURN = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_DECIMALS = Context(prec=40)


ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU}
# Operations of a core and bytes of all cores in a second, on a machine of the year 2019: a first guess.
EXPECTED_QUANTISED, EXPECTED_DENSE, EXPECTED_MEMORY = 60e9, 16e9, 16e9


def objection(
    source: TensorSource, block_size: int, quantization: str = "auto", kv_dtype: str = "float32"
) -> str:
    """Why a model cannot run on the native kernels, in words; empty when it can."""
    spec = source.spec
    if spec.activation not in ACTIVATIONS:
        return f"there is no native {spec.activation} activation"
    if any(rope.kind == "dynamic" for rope in spec.ropes):
        return "its rotary positions depend on the length of a sequence (dynamic)"
    if len({rope.rotary_dim for rope in spec.ropes}) > 1:
        return "its layers turn different parts of a head"
    if block_size % SUB_BLOCK:
        return f"blocks of {block_size} tokens are not a multiple of {SUB_BLOCK}"
    kinds = kinds_of(map(source.tensor, matrix_names(spec)), quantization)
    is_quantised = any(kind in QUANTISED for kind in kinds.values())
    sizes = {"hidden size": (spec.hidden_size, GROUP if is_quantised else COLUMNS)}
    sizes["head size"] = (spec.head_dim, GROUP if is_quantised or kv_dtype == "int8" else COLUMNS)
    sizes["intermediate size"] = (spec.intermediate_size, GROUP)
    if spec.experts is not None:
        sizes["experts' intermediate size"] = (spec.experts.intermediate_size, GROUP)
    for name, (size, step) in sizes.items():
        if size % step:
            return f"its {name} of {size} is not a multiple of {step}"
    for name, kind in kinds.items():
        if is_quantised and kind not in QUANTISED and name.endswith(("o_proj.weight", "down_proj.weight")):
            return f"{name} is dense among quantised matrices"
    return ""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativeModel:
    """Weights in memory, and where the step finds them."""

    spec: ModelSpec
    arena: Arena
    embedding: Matrix
    head: Matrix
    last_norm: int
    last_norm_weight: NDArray[np.float32]
    layers: NDArray[np.int64]  # [layer, field], see `layout.LAYER`
    turns: list[tuple[Floats, Floats]]  # of each rope: cos and sin of every position
    input_bytes: int  # of what quantised matrices are multiplied with; 0: none is quantised
    max_positions: int
    ranges: list[Range]  # all of its memory

    @property
    def kinds(self) -> str:
        """The kinds of its panels, for people."""
        columns = [LAYER[f"{name}_kind"] for name in _ATTENTION]
        return ", ".join(KINDS[kind] for kind in sorted(set(self.layers[:, columns].ravel().tolist())))


def expected_seconds(model: NativeModel, threads: int) -> tuple[float, float]:
    """About what a step takes at least, and for each token more; what steps really take is learned while serving."""
    speed = EXPECTED_QUANTISED if model.input_bytes else EXPECTED_DENSE
    work = model_work(model.spec, weight_bytes=model.arena.size, kv_token_bytes=0.0)
    return model.arena.size / EXPECTED_MEMORY, work.token_flops / (speed * threads)


def build_model(
    source: TensorSource,
    max_positions: int,
    on_matrix: Callable[[int, int], None] | None = None,
    quantization: str = "auto",
) -> NativeModel:
    """Repack a model that has no `objection`."""
    spec = source.spec
    arena, matrices = build_arena(source, matrix_names(spec), on_matrix, quantization)
    names = source.names()

    def vector(name: str, offset: float = 0.0) -> int:
        return arena.keep(_float32(source.tensor(name)) + np.float32(offset)) if name in names else 0

    tables = [rope_tables(rope, max_positions) for rope in spec.ropes]
    turns = [(arena.keep(cos), arena.keep(sin)) for cos, sin in tables]
    layers = np.zeros((spec.num_layers, len(LAYER)), np.int64)
    for number in range(spec.num_layers):
        prefix = f"model.layers.{number}."
        row: dict[str, int] = {}
        parts = _ATTENTION if spec.has_experts(number) else _ATTENTION | _FEED_FORWARD
        row |= _matrices(matrices, prefix, parts)
        if spec.experts is not None and spec.has_experts(number):
            row |= _matrices(matrices, prefix, {"router": "mlp.gate"})
            row["experts"] = arena.keep(_experts(matrices, prefix, spec.experts.num_experts))
        row |= {field: vector(prefix + name, spec.norm_offset) for field, name in _norms(spec).items()}
        biases = [f"{prefix}self_attn.{part}_proj.bias" for part in "qkv"]
        if spec.qkv_bias:
            row["qkv_bias"] = arena.keep(np.concatenate([_float32(source.tensor(name)) for name in biases]))
        row["output_bias"] = vector(prefix + "self_attn.o_proj.bias")
        row["cos"], row["sin"] = turns[spec.layer_ropes[number]]
        row["window"] = spec.windows[number] or 0
        for field, value in row.items():
            layers[number, LAYER[field]] = value
    embedding = matrices["model.embed_tokens.weight"]
    last_norm = _float32(source.tensor("model.norm.weight")) + np.float32(spec.norm_offset)
    return NativeModel(
        spec=spec,
        arena=arena,
        embedding=embedding,
        head=embedding if spec.tied_embeddings else matrices["lm_head.weight"],
        last_norm=arena.keep(last_norm),
        last_norm_weight=last_norm,
        layers=layers,
        turns=tables,
        input_bytes=max(
            (2 if matrix.kind == Q8_FINE else 1 for matrix in matrices.values() if matrix.kind in QUANTISED),
            default=0,
        ),
        max_positions=max_positions,
        ranges=[Range(name, matrix.at, matrix.size) for name, matrix in matrices.items()]
        + [Range.of("a small tensor", values) for values in arena.kept],
    )


_ATTENTION = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
}
_FEED_FORWARD = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


def _matrices(matrices: dict[str, Matrix], prefix: str, parts: dict[str, str]) -> dict[str, int]:
    """Kind and place of each part, as fields of a row."""
    row: dict[str, int] = {}
    for field, name in parts.items():
        matrix = matrices[f"{prefix}{name}.weight"]
        row |= {field: matrix.at, f"{field}_kind": matrix.kind}
    return row


def _experts(matrices: dict[str, Matrix], prefix: str, count: int) -> NDArray[np.int64]:
    rows = np.zeros((count, len(EXPERT)), np.int64)
    for expert in range(count):
        parts = {field: f"mlp.experts.{expert}.{field}_proj" for field in ("gate", "up", "down")}
        for field, value in _matrices(matrices, prefix, parts).items():
            rows[expert, EXPERT[field]] = value
    return rows


def _norms(spec: ModelSpec) -> dict[str, str]:
    """Where each norm of a layer stands under which name. A name that a model lacks gives no norm."""
    names = {"norm_before_attention": "input_layernorm.weight"}
    if spec.qk_norm:
        names |= {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
    if not spec.sandwich_norms:
        return names | {"norm_before_feed_forward": "post_attention_layernorm.weight"}
    return names | {
        "norm_after_attention": "post_attention_layernorm.weight",
        "norm_before_feed_forward": "pre_feedforward_layernorm.weight",
        "norm_after_feed_forward": "post_feedforward_layernorm.weight",
    }


def _float32(tensor: StoredTensor) -> NDArray[np.float32]:
    values = tensor.to_float32()
    check_finite(values, tensor.name)
    return values


def rope_tables(rope: RopeSpec, max_positions: int) -> tuple[Floats, Floats]:
    """cos and sin of every position, [positions, rotary_dim / 2] each, in float64 and rounded once.

    Mathematical libraries differ in the last bit from one processor to the next, and so would a model's tokens. Powers
    and logarithms come from decimal arithmetic here, cos and sin from additions and products alone, which round the
    same way everywhere.
    """
    frequencies = _frequencies(rope)
    tables = [np.empty((max_positions, len(frequencies)), np.float32) for _ in range(2)]
    for start in range(0, max_positions, _AT_ONCE):
        positions = np.arange(start, min(start + _AT_ONCE, max_positions), dtype=np.float64)
        for table, values in zip(tables, cos_and_sin(np.outer(positions, frequencies)), strict=True):
            table[start : start + _AT_ONCE] = values * rope.attention_factor
    return tables[0], tables[1]


def taken_turns(tables: tuple[Floats, Floats], rope: RopeSpec, turns: Index) -> tuple[Floats, Floats]:
    """cos and sin of tokens that turn by several numbers [axes, tokens], out of those of every position."""
    axes = np.array(rope.axes or (0,) * tables[0].shape[1])
    cos, sin = (np.ascontiguousarray(table[turns[axes].T, np.arange(len(axes))]) for table in tables)
    return cos, sin


def shift_turn(rope: RopeSpec, shift: int) -> tuple[Floats, Floats]:
    """cos and sin of what turns a key from its position to one `shift` further. The factor that some kinds put on a
    rotation is in the key already."""
    cos, sin = cos_and_sin(shift * _frequencies(rope))
    return cos.astype(np.float32), sin.astype(np.float32)


def cos_and_sin(angles: Doubles) -> tuple[Doubles, Doubles]:
    """Of angles up to about a million, within 2e-16."""
    quarter = np.rint(angles * (2 / math.pi))
    rest = angles.copy()
    for part in _QUARTER_TURN:  # each but the last has few enough bits for an exact product
        rest -= quarter * part
    square = rest * rest
    cos, sin = np.zeros_like(rest), np.zeros_like(rest)
    for power in range(_TERMS, 0, -1):
        cos = (cos + 1) * square * (-1 / ((2 * power) * (2 * power - 1)))
        sin = (sin + 1) * square * (-1 / ((2 * power) * (2 * power + 1)))
    cos, sin = cos + 1, sin * rest + rest
    turn = quarter.astype(np.int64) & 3
    is_odd = turn & 1 == 1
    cos, sin = np.where(is_odd, sin, cos), np.where(is_odd, cos, sin)
    return np.where((turn == 1) | (turn == 2), -cos, cos), np.where(turn >= 2, -sin, sin)


def _frequencies(rope: RopeSpec) -> Doubles:
    assert rope.kind != "dynamic", "a rotation that depends on the length of a sequence has no table"
    if rope.kind == "axial":  # each of two numbers turns half of the pairs, at all speeds
        return np.tile(_frequencies(replace(rope, rotary_dim=rope.rotary_dim // 2, kind="default")), 2)
    theta = Decimal(rope.theta)
    exponents = (_DECIMALS.divide(-pair, rope.rotary_dim) for pair in range(0, rope.rotary_dim, 2))
    plain: Doubles = np.array([float(_DECIMALS.power(theta, exponent)) for exponent in exponents])
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeSpec, plain: Doubles) -> Doubles:
    """Slow pairs are slowed further, fast ones stay, those between go from one to the other."""
    wavelength = 2 * math.pi / plain
    longest = rope.trained_positions / rope.low_freq_factor
    shortest = rope.trained_positions / rope.high_freq_factor
    slowed = np.where(wavelength > longest, plain / rope.factor, plain)
    blend = (rope.trained_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(between, (1 - blend) * slowed / rope.factor + blend * slowed, slowed)


def _yarn(rope: RopeSpec, plain: Doubles) -> Doubles:
    """Pairs that turn often within the trained length stay, those that turn seldom are interpolated."""

    def pair_that_turns(times: float) -> float:
        ratio = rope.trained_positions / (times * 2 * math.pi)
        return rope.rotary_dim * _log(ratio) / (2 * _log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
    blended: Doubles = plain / rope.factor * ramp + plain * (1 - ramp)
    return blended


def _log(value: float) -> float:
    return float(_DECIMALS.ln(Decimal(value)))
