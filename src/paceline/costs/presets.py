"""Shapes of public models and rates of common devices, by name.

A `ModelShape` counts weights and KV bytes; a `DeviceSpec` says how fast they are read and multiplied.
Each device's `source` says which of its numbers were measured and which are published or assumed.
Prices are not kept here: they age faster than code, so a caller gives its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.costs.cost_model import PiecewiseLinear
from paceline.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCurve:
    """FLOP/s reached on a layer of `layer_parameters` weights at each row count, rows ascending."""

    layer_parameters: int
    rows: tuple[float, ...]
    flops: tuple[float, ...]

    def seconds_per_parameter(self) -> PiecewiseLinear:
        """Seconds per weight as a function of rows. Few rows cost what the first point costs (a pass over
        the weights); many go on at the rate of the last point."""
        seconds = [2.0 * rows / rate for rows, rate in zip(self.rows, self.flops, strict=True)]
        return PiecewiseLinear(self.rows, seconds, 2.0 / self.flops[-1])


MIB = 1 << 20
GIB = 1 << 30
MEMORY_SHARE = 0.9  # of a device, for weights and KV cache
ENCODED_TOKENS = 65_536  # vectors of pictures that are kept
ENCODED_UNITS = 16_384  # of a group of pictures, on a GPU
TEXT_SLOTS = 1 << 22  # of a model that keeps no KV: its blocks are only counted


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """What makes vectors of pictures before a decoder reads them, as numbers."""

    layers: int
    hidden: int
    intermediate: int
    gated: bool
    units_per_token: int  # patches that become one vector of the decoder
    end_parameters: int  # behind the layers, for each vector
    input_values: int  # of a patch: what the first product reads
    full_layers: int | None = None  # those in which a unit sees all others; None: all of them
    window_units: int = 0  # that a unit sees in the others
    vectors_per_token: int = 1  # kept for the decoder: more where some of its layers get their own

    @property
    def layer_parameters(self) -> int:
        return 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def num_parameters(self) -> int:
        around = self.end_parameters + self.input_values * self.hidden
        return self.layers * (self.layer_parameters + 2 * self.hidden) + around

    @property
    def full_share(self) -> float:
        """Of the layers."""
        return 1.0 if self.full_layers is None else self.full_layers / self.layers

    @property
    def unit_parameters(self) -> float:
        """Weights that a unit meets on its way, in one of the layers."""
        around = self.end_parameters / self.units_per_token + self.input_values * self.hidden
        return self.layer_parameters + around / self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer with grouped-query attention, as numbers: a decoder, or an encoder of texts."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the LM head is the embedding
    qk_norm: bool = False  # a norm over each query and key head, as in Qwen3
    dtype_bytes: int = 2
    gated: bool = True  # three products in the feed-forward part, not two
    bidirectional: bool = False  # tokens see those behind them: it makes vectors, and keeps no KV
    encoder: EncoderShape | None = None  # of pictures
    layer_weight_bytes: float | None = (
        None  # of a quantised weight of a layer, its scales included; None: an element's
    )
    kv_element_bytes: int | None = None  # None: an element's
    head_vocab: int | None = None  # ids whose logits one of several ranks computes; None: all

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrix products."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Weights of the LM head, whether tied or not."""
        return 0 if self.bidirectional else (self.head_vocab or self.vocab) * self.hidden

    @property
    def num_parameters(self) -> int:
        """All weights, norms and embeddings included."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        tables = self.vocab * self.hidden + (0 if self.tied else self.head_parameters)
        decoder = self.layers * (self.layer_parameters + norms) + self.hidden + tables
        return decoder + (0 if self.encoder is None else self.encoder.num_parameters)

    @property
    def weight_bytes(self) -> int:
        products = self.layers * self.layer_parameters
        width = self.layer_weight_bytes or self.dtype_bytes
        return round(products * width) + (self.num_parameters - products) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        if self.bidirectional:
            return 0
        width = self.kv_element_bytes or self.dtype_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    @property
    def encoding_bytes(self) -> int:
        """Memory for the vectors of pictures, and for the group of them that is being encoded."""
        encoder = self.encoder
        if encoder is None:
            return 0
        vectors = ENCODED_TOKENS * encoder.vectors_per_token * self.hidden
        return (vectors + ENCODED_UNITS * 3 * encoder.hidden) * self.dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device. Bandwidths in bytes/s, rates in FLOP/s."""

    name: str
    memory_bytes: int
    read_bandwidth: float  # sustained by a plain read
    matmul_peak: float  # best rate of a large matrix product
    attention_efficiency: float  # share of read_bandwidth that decode attention reaches
    attention_flops: float  # prefill attention, causal: only the products below the diagonal are counted
    host_link_bandwidth: float
    fixed_step_s: float  # host gap, launches and small kernels of a step, whatever its size
    matmul_curves: tuple[MatmulCurve, ...] = ()  # measured; empty: the shares of its limits an H200 reached
    element_bytes: int | None = None  # width the device computes in; None: the model's own
    # Of a weight that is read, where weights are quantised; None: an element's.
    weight_bytes: float | None = None
    four_bit_peak: float | None = None  # of products of 4-bit numbers; None: they are computed as wider ones
    source: str = ""

    def seconds_per_parameter(self, rows: float, element_bytes: int) -> float:
        """What no product can beat: reading its weights once, and the best rate the device reached."""
        width = element_bytes if self.weight_bytes is None else self.weight_bytes
        return max(width / self.read_bandwidth, 2.0 * rows / self.matmul_peak)

    def ridge_rows(self, element_bytes: int) -> float:
        """Rows at which reading the weights and multiplying with them take equally long."""
        width = element_bytes if self.weight_bytes is None else self.weight_bytes
        return width * self.matmul_peak / (2.0 * self.read_bandwidth)

    def for_layers(self, model: ModelShape) -> DeviceSpec:
        """What the products of this model's layers meet: quantised weights are read narrower, and multiplied faster
        where the device multiplies numbers so narrow."""
        if model.layer_weight_bytes is None:
            return self
        return replace(
            self, weight_bytes=model.layer_weight_bytes, matmul_peak=self.four_bit_peak or self.matmul_peak
        )


def model_shape(name: str) -> ModelShape:
    return _lookup(MODELS, name, "model")


def device_spec(name: str) -> DeviceSpec:
    return _lookup(DEVICES, name, "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What a device's data sheet promises: dense products of 16-bit numbers, and reads of its memory."""

    flops: float
    bandwidth: float


def published_peak(device: str) -> Peak | None:
    """The peak of a device by the name its driver gives it; None where it is not known for sure."""
    name = _DRIVER_NAMES.get(device)
    return None if name is None else Peak(flops=_PUBLISHED_FLOPS[name], bandwidth=_PUBLISHED_BANDWIDTH[name])


def matmul_curves(device: DeviceSpec) -> tuple[MatmulCurve, ...]:
    """The device's own measurements, or the H200's carried over to its limits."""
    return device.matmul_curves or tuple(_carried_over(curve, device) for curve in _H200.matmul_curves)


def _carried_over(curve: MatmulCurve, device: DeviceSpec) -> MatmulCurve:
    """A curve of the H200 as this device would show it: the same share of its own limits at the same place relative to
    its ridge, the row count where memory and arithmetic balance."""
    stretch = device.ridge_rows(2) / _H200.ridge_rows(2)
    measured = curve.seconds_per_parameter()
    rates = []
    for rows in curve.rows:
        slowdown = measured(rows) / _H200.seconds_per_parameter(rows, 2)
        seconds = slowdown * device.seconds_per_parameter(rows * stretch, 2)
        rates.append(2.0 * rows * stretch / seconds)
    return replace(curve, rows=tuple(rows * stretch for rows in curve.rows), flops=tuple(rates))


def layers_seconds(model: ModelShape, device: DeviceSpec) -> PiecewiseLinear:
    """Seconds of the matrix products of all layers, as a function of rows.

    The time of a layer is taken as a fixed part plus a part in proportion to its parameters, which is the line through
    the two measured shapes; it is never faster than the device's memory or its best rate.
    """
    device = device.for_layers(model)
    ordered = sorted(matmul_curves(device), key=lambda curve: curve.layer_parameters)
    knots = sorted({rows for curve in ordered for rows in curve.rows})
    values = []
    for rows in knots:
        floor = device.seconds_per_parameter(rows, model.dtype_bytes) * model.layer_parameters
        values.append(max(floor, _layer_seconds(ordered, rows, model.layer_parameters)) * model.layers)
    # The slope after the last knot: what one more row costs when the rate no longer changes.
    return PiecewiseLinear(knots, values, values[-1] / knots[-1])


def head_seconds(model: ModelShape, device: DeviceSpec) -> PiecewiseLinear:
    """Seconds of the LM head, one matrix far larger than a layer's: at the rate of the largest shape."""
    largest = max(matmul_curves(device), key=lambda curve: curve.layer_parameters)
    rate = largest.seconds_per_parameter()
    values = [
        model.head_parameters * max(device.seconds_per_parameter(rows, model.dtype_bytes), rate(rows))
        for rows in largest.rows
    ]
    return PiecewiseLinear(largest.rows, values, values[-1] / largest.rows[-1])


def _layer_seconds(ordered: Sequence[MatmulCurve], rows: float, parameters: int) -> float:
    """On the line through the measured shapes; beyond the largest in proportion to it."""
    largest = ordered[-1]
    if len(ordered) == 1 or parameters >= largest.layer_parameters:
        return largest.seconds_per_parameter()(rows) * parameters
    above = next(i for i, curve in enumerate(ordered) if parameters <= curve.layer_parameters)
    small, large = ordered[max(above - 1, 0)], ordered[max(above, 1)]
    small_s = small.seconds_per_parameter()(rows) * small.layer_parameters
    large_s = large.seconds_per_parameter()(rows) * large.layer_parameters
    share = (parameters - small.layer_parameters) / (large.layer_parameters - small.layer_parameters)
    return small_s + (large_s - small_s) * share


def as_held(model: ModelShape, device: DeviceSpec) -> ModelShape:
    """The model with the element width it has on this device."""
    return model if device.element_bytes is None else replace(model, dtype_bytes=device.element_bytes)


def kv_capacity_tokens(model: ModelShape, device: DeviceSpec) -> int:
    """Token slots that fit beside the weights in the share of the device's memory that may be used. Of a model over
    ranks: what one of them holds (`network.rank_shape`)."""
    held = as_held(model, device)
    usable = int(device.memory_bytes * MEMORY_SHARE)
    left = usable - held.weight_bytes - held.encoding_bytes
    slots = left // held.kv_bytes_per_token if held.kv_bytes_per_token else min(left, TEXT_SLOTS)
    if slots < 1:
        raise InputError(
            f"{model.name} does not fit on {device.name}: its weights take {held.weight_bytes / GIB:.1f} GiB "
            f"and {usable / GIB:.1f} GiB may be used; choose a smaller model or a larger device"
        )
    return slots


_Preset = TypeVar("_Preset")


def _lookup(known: Mapping[str, _Preset], name: str, kind: str) -> _Preset:
    found = known.get(name.lower())
    if found is None:
        raise InputError(f"unknown {kind} '{name}'; known ones are {', '.join(sorted(known))}")
    return found


def _qwen3(name: str, layers: int, hidden: int, intermediate: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocab=151_936,
        tied=False,
        qk_norm=True,
    )


def _llama3(name: str, layers: int, hidden: int, intermediate: int, heads: int) -> ModelShape:
    return replace(_qwen3(name, layers, hidden, intermediate, heads), vocab=128_256, qk_norm=False)


def _bert(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=30_522,
        tied=True,
        gated=False,
        bidirectional=True,
    )


_SMOLLM2 = ModelShape(
    name="smollm2-135m",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49_152,
    tied=True,
)
# SigLIP with tiles of 512 x 512; 4 x 4 patches become a vector.
_SMOLVLM_ENCODER = EncoderShape(
    layers=12,
    hidden=768,
    intermediate=3072,
    gated=False,
    units_per_token=16,
    end_parameters=16 * 768 * 576,
    input_values=3 * 16 * 16,
)
_QWEN25_VL_ENCODER = EncoderShape(
    layers=32,
    hidden=1280,
    intermediate=3420,
    gated=True,
    units_per_token=4,
    end_parameters=5120 * 5120 + 5120 * 3584,
    input_values=3 * 2 * 14 * 14,
    full_layers=4,
    window_units=64,
)
# Three layers of the decoder get vectors of layers before the last; each has its own end.
_QWEN3_VL_ENCODER = EncoderShape(
    layers=27,
    hidden=1152,
    intermediate=4304,
    gated=False,
    units_per_token=4,
    end_parameters=4 * (4608 * 4608 + 4608 * 4096),
    input_values=3 * 2 * 16 * 16,
    vectors_per_token=4,
)

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        replace(_qwen3("qwen3-0.6b", 28, 1024, 3072, 16), tied=True),
        _qwen3("qwen3-8b", 36, 4096, 12_288, 32),
        _qwen3("qwen3-14b", 40, 5120, 17_408, 40),
        replace(_llama3("llama-3.2-1b", 16, 2048, 8192, 32), head_dim=64, tied=True),
        _llama3("llama-3.1-8b", 32, 4096, 14_336, 32),
        _llama3("llama-3.1-70b", 80, 8192, 28_672, 64),
        # NVIDIA's FP4 checkpoint: 4 bits and a byte of scale for 16 weights in layers, KV in FP8, the rest in bf16.
        replace(
            _llama3("llama-3.3-70b", 80, 8192, 28_672, 64), layer_weight_bytes=0.5625, kv_element_bytes=1
        ),
        _SMOLLM2,
        replace(_SMOLLM2, name="smolvlm-256m", vocab=49_280, tied=False, encoder=_SMOLVLM_ENCODER),
        replace(
            _qwen3("qwen2.5-vl-7b", 28, 3584, 18_944, 28),
            kv_heads=4,
            vocab=152_064,
            qk_norm=False,
            encoder=_QWEN25_VL_ENCODER,
        ),
        replace(_qwen3("qwen3-vl-8b", 36, 4096, 12_288, 32), encoder=_QWEN3_VL_ENCODER),
        replace(_qwen3("qwen3-embedding-0.6b", 28, 1024, 3072, 16), vocab=151_669, tied=True),
        _bert("bert-base", 12, 768, 12),
        _bert("minilm", 6, 384, 12),
    )
}

# Matrix products of a whole decode step on one H200, LM head included, bf16, cuBLAS in a CUDA graph, in ms.
H200_STEP_ROWS = (1, 8, 64, 128, 256, 512, 1024)
H200_STEP_MS = {
    "qwen3-0.6b": (0.92, 0.76, 0.81, 0.85, 0.93, 1.22, 2.00),
    "llama-3.1-8b": (4.00, 3.98, 4.25, 4.60, 6.62, 11.70, 23.63),
}
# Above 1,024 rows nothing was measured directly; these rates are what a prefill of 64 prompts implies.
H200_BULK_ROWS = 2048
H200_BULK_FLOPS = {"qwen3-0.6b": 600e12, "llama-3.1-8b": 680e12}


def _h200_curves() -> tuple[MatmulCurve, ...]:
    """Split each measured step into layers and LM head. The 8B step is large matrices throughout and sets the
    rate of a large matrix; what the small model's step takes beyond a head at that rate, its layers take."""
    rows = tuple(float(n) for n in (*H200_STEP_ROWS, H200_BULK_ROWS))
    small, large = MODELS["qwen3-0.6b"], MODELS["llama-3.1-8b"]
    large_products = large.layers * large.layer_parameters + large.head_parameters
    large_rates = [
        2.0 * large_products * n / (ms / 1e3)
        for n, ms in zip(H200_STEP_ROWS, H200_STEP_MS[large.name], strict=True)
    ]
    small_rates = []
    for n, ms, head_rate in zip(H200_STEP_ROWS, H200_STEP_MS[small.name], large_rates, strict=True):
        layers_s = ms / 1e3 - 2.0 * small.head_parameters * n / head_rate
        small_rates.append(2.0 * small.layers * small.layer_parameters * n / layers_s)
    return (
        MatmulCurve(
            layer_parameters=small.layer_parameters,
            rows=rows,
            flops=(*small_rates, H200_BULK_FLOPS[small.name]),
        ),
        MatmulCurve(
            layer_parameters=large.layer_parameters,
            rows=rows,
            flops=(*large_rates, H200_BULK_FLOPS[large.name]),
        ),
    )


_H200 = DeviceSpec(
    name="h200",
    memory_bytes=143_771 * MIB,
    read_bandwidth=4.22e12,
    matmul_peak=790e12,
    matmul_curves=_h200_curves(),
    attention_efficiency=0.88,
    attention_flops=360e12,
    host_link_bandwidth=50e9,
    fixed_step_s=0.5e-3,
    source="read bandwidth, peak and matrix products to 1,024 rows measured; the rest estimated",
)


_PUBLISHED_BANDWIDTH = {"h200": 4.8e12, "h100": 3.35e12, "a100": 2.039e12, "b200": 8e12}
_PUBLISHED_FLOPS = {"h200": 989e12, "h100": 989e12, "a100": 312e12, "b200": 2250e12}  # dense bf16
_PUBLISHED_FOUR_BIT_FLOPS = {"b200": 9000e12}  # dense
# Other variants of these chips have other memories and clocks.
_DRIVER_NAMES = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
}


def _from_data_sheet(name: str, memory_bytes: int, host_link_bandwidth: float) -> DeviceSpec:
    """A GPU known by its data sheet alone, granted the share of its limits that the H200 reached."""
    bandwidth_ratio = _PUBLISHED_BANDWIDTH[name] / _PUBLISHED_BANDWIDTH["h200"]
    flops_ratio = _PUBLISHED_FLOPS[name] / _PUBLISHED_FLOPS["h200"]
    four_bit = _PUBLISHED_FOUR_BIT_FLOPS.get(name)
    return replace(
        _H200,
        name=name,
        memory_bytes=memory_bytes,
        read_bandwidth=_H200.read_bandwidth * bandwidth_ratio,
        matmul_peak=_H200.matmul_peak * flops_ratio,
        matmul_curves=(),
        attention_flops=_H200.attention_flops * flops_ratio,
        four_bit_peak=None if four_bit is None else four_bit * _H200.matmul_peak / _PUBLISHED_FLOPS["h200"],
        host_link_bandwidth=host_link_bandwidth,
        source="published peaks times the efficiency measured on an H200; nothing measured",
    )


_CPU_2CORE = DeviceSpec(
    name="cpu-2core",
    memory_bytes=16 * GIB,
    read_bandwidth=18e9,
    matmul_peak=168e9,
    # What whole steps leave for products: see `CPU_2CORE_STEP_MS`.
    matmul_curves=(
        MatmulCurve(
            layer_parameters=MODELS["smollm2-135m"].layer_parameters,
            rows=(1.0, 8.0, 32.0, 108.0),
            flops=(47.6e9, 114e9, 147e9, 167.7e9),
        ),
    ),
    attention_efficiency=0.89,
    attention_flops=40e9,
    host_link_bandwidth=10e9,
    fixed_step_s=0.35e-3,
    element_bytes=4,
    weight_bytes=0.73,
    source="steps of SmolLM2-135M in 4 bits measured on two Neoverse-N1 cores; the rest assumed",
)
# Those steps, without an engine: rows of 140 tokens of context that decode, a prompt of 108 tokens, one of 2,000
# (benchmarks/results/cpu_server_n1.json).
CPU_2CORE_STEP_MS = {"1": 6.52, "8": 23.41, "32": 75.6, "prompt of 108": 158.8, "prompt of 2000": 6186.0}

_CPU_2CORE_XEON = replace(
    _CPU_2CORE,
    name="cpu-2core-xeon",
    matmul_peak=229.3e9,
    matmul_curves=(replace(_CPU_2CORE.matmul_curves[0], flops=(36.9e9, 130.1e9, 171.1e9, 229.2e9)),),
    source="steps of SmolLM2-135M in 4 bits measured on two Xeon cores (Cascade Lake, AVX-512 VNNI); the rest as "
    "on cpu-2core",
)
CPU_2CORE_XEON_STEP_MS = {"1": 8.16, "8": 21.07, "32": 67.36, "prompt of 108": 122.4}  # cpu_server_x86.json

DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _H200,
        _from_data_sheet("h100", 81_559 * MIB, 50e9),
        _from_data_sheet("a100", 81_920 * MIB, 25e9),
        _from_data_sheet("b200", 180 * 10**9, 50e9),  # an eighth of a DGX B200, as its data sheet has it
        _CPU_2CORE,
        _CPU_2CORE_XEON,
    )
}
