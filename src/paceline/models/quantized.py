"""Weights that stay quantised, multiplied by the best products torch has on the machine.

A weight is scale * q + offset with one scale and offset per group of 32 inputs. On ARM the 4-bit product takes values
around zero and quantises its input: q - 8 goes through it, and the rest is one small product with the sums of each
group's inputs; eight bits go through the product of bytes with bytes. On x86 the 4-bit product takes offsets and
bfloat16. With each, the result of a row does not depend on how many rows there are.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.files.records import record_of_gguf
from paceline.models.files.stored import StoredTensor, check_finite
from paceline.models.layers import Linear
from paceline.models.load import DenseStorage

GROUP = 32
EDGE = 32  # columns added to a product of bytes: the two that fix the scale, and zeros up to a whole group
TINY = 1e-30  # what a row of zeros is divided by
BYTE_ENGINE = "onednn"
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_packing = threading.Lock()


def fast_product() -> str | None:
    """Which fast 4-bit product this machine has: "dynamic" (ARM), "bfloat16" (x86) or none."""
    kleidi = getattr(torch.backends, "kleidiai", None)
    if kleidi is not None and kleidi.is_available():
        return "dynamic"
    return "bfloat16" if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else None


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A matrix [out, in] as scale * q + offset, scale and offset [out, in / 32]; q below 16 or below 256."""

    q: Bytes
    scale: Floats
    offset: Floats
    bits: int


class BFloat16Linear:
    """A product of bfloat16 inputs with 4-bit weights, for x86."""

    def __init__(self, groups: Groups, bias: Tensor | None = None) -> None:
        assert groups.bits == 4
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self._packed: Tensor = pack(torch.from_numpy(groups.q.astype(np.int32)), 2)
        scale, offset = torch.from_numpy(groups.scale), torch.from_numpy(groups.offset)
        both = torch.stack([scale, offset + 8 * scale], dim=-1).transpose(0, 1)
        self._scale_and_offset = both.contiguous().to(torch.bfloat16)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        out: Tensor = product(x.to(torch.bfloat16), self._packed, GROUP, self._scale_and_offset).float()
        return out if self._bias is None else out + self._bias


class DynamicLinear:
    """A product with 4-bit weights and inputs quantised on the way, for ARM."""

    def __init__(self, groups: Groups, bias: Tensor | None = None) -> None:
        assert groups.bits == 4
        self._out, self._in = groups.q.shape
        scale = torch.from_numpy(groups.scale)
        pairs = torch.from_numpy(groups.q[:, 0::2] | (groups.q[:, 1::2] << 4))
        self._packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(
            pairs, scale.to(torch.bfloat16), None, GROUP, self._in, self._out
        )
        # What values around zero leave out, per group of inputs; None where a format is symmetric.
        rest = torch.from_numpy(groups.offset) + 8 * scale
        self._rest = rest.t().contiguous() if bool(rest.any()) else None
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(x, self._packed, GROUP, self._in, self._out)
        if self._rest is not None:
            sums = x.view(len(x), -1, GROUP).sum(dim=-1)
            if len(x) == 1:  # a single row would be summed in another order
                out += torch.mm(sums.expand(2, -1), self._rest)[:1]
            else:
                out.addmm_(sums, self._rest)
        if self._bias is not None:
            out += self._bias
        return out


class ByteLinear:
    """A product of bytes with bytes, for ARM: one scale for each row of weights and for each row of inputs.

    The product chooses one scale for all its inputs, from the smallest and the largest of them. So each row is moved
    and stretched to lie between -1 and 1, and two columns that meet no weight hold these two: the scale is then
    always the same, and no row feels another.
    """

    def __init__(self, groups: Groups, bias: Tensor | None = None) -> None:
        weight = torch.from_numpy(_dense(groups))
        self._scale = weight.abs().amax(dim=1).clamp_min_(TINY)
        ends = torch.zeros(len(weight), EDGE)
        values = torch.cat([weight / self._scale[:, None], ends], dim=1)
        self._packed = _pack_bytes(values)
        # Of the weights as bytes: their rounding then meets the inputs as they are, not as they were moved.
        self._sums = (values * 127).round_().sum(dim=1).div_(127).mul_(self._scale)
        self._edge = torch.zeros(1, EDGE)
        self._edge[0, 0], self._edge[0, 1] = 1.0, -1.0
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        low, high = torch.aminmax(x, dim=1, keepdim=True)
        middle, reach = (low + high).mul_(0.5), (high - low).mul_(0.5).clamp_min_(TINY)
        scaled = torch.cat([(x - middle).div_(reach), self._edge.expand(len(x), -1)], dim=1)
        # Nothing beyond the two ends may reach the others through the common scale: not the last bit of a
        # rounding, and not a row that is not finite, whose own result is not finite either, by its middle.
        scaled.nan_to_num_().clamp_(-1.0, 1.0)
        out: Tensor = torch.ops.quantized.linear_dynamic(scaled, self._packed, False)
        out.mul_(reach).mul_(self._scale).addcmul_(middle, self._sums)
        if self._bias is not None:
            out += self._bias
        return out


def _pack_bytes(values: Tensor) -> Any:
    """Values in [-1, 1] as signed bytes, packed for the product."""
    with _packing:  # the engine and the filters of warnings are the whole process's
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = BYTE_ENGINE
        try:
            with warnings.catch_warnings():
                # It says that quantised tensors will leave torch one day; the storage then no longer offers this.
                warnings.simplefilter("ignore")
                quantised = torch.quantize_per_tensor(values, 1 / 127, 0, torch.qint8)
                return torch.ops.quantized.linear_prepack(quantised, None)
        finally:
            torch.backends.quantized.engine = before


class StackedLinear:
    """Products of one input side by side, where their weights differ in kind."""

    def __init__(self, parts: Sequence[Linear], bias: Tensor | None) -> None:
        self._parts, self._bias = parts, bias

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.cat([part(x) for part in self._parts], dim=-1)
        return out if self._bias is None else out + self._bias


class QuantizedEmbedding:
    """Rows of 8-bit values with a scale per group, decoded when they are looked up."""

    def __init__(self, groups: Groups) -> None:
        self._q = torch.from_numpy((groups.q.astype(np.int16) - 128).astype(np.int8))
        self._scale = torch.from_numpy(groups.scale)

    def __call__(self, x: Tensor) -> Tensor:
        scale = self._scale[x].unsqueeze(-1)
        return (self._q[x].float().view(len(x), -1, GROUP) * scale).flatten(1)


class QuantizedStorage:
    """Keeps quantised matrices quantised; the rest is dense."""

    def __init__(self, product: str) -> None:
        self._dense = DenseStorage()
        # By bits. Eight would lose through bfloat16 what they hold more than four.
        self._make: dict[int, Callable[[Groups, Tensor | None], Linear]] = {
            4: DynamicLinear if product == "dynamic" else BFloat16Linear
        }
        has_bytes = BYTE_ENGINE in torch.backends.quantized.supported_engines
        if product == "dynamic" and has_bytes and hasattr(torch, "quantize_per_tensor"):
            self._make[8] = ByteLinear

    def linear(self, weights: Sequence[StoredTensor], bias: Tensor | None) -> Linear:
        groups = [_groups(weight) for weight in weights]
        kept = [group for group in groups if group is not None and group.bits in self._make]
        if len(kept) < len(groups):
            return self._dense.linear(weights, bias)
        if len({group.bits for group in kept}) == 1:
            return self._make[kept[0].bits](_stack(kept), bias)
        return StackedLinear([self._make[group.bits](group, None) for group in kept], bias)

    def embedding(self, weight: StoredTensor) -> Linear:
        groups = _groups(weight)
        if groups is None or groups.bits != 8:
            return self._dense.embedding(weight)
        return QuantizedEmbedding(groups)


def _stack(groups: Sequence[Groups]) -> Groups:
    return Groups(
        np.concatenate([group.q for group in groups]),
        np.concatenate([group.scale for group in groups]),
        np.concatenate([group.offset for group in groups]),
        groups[0].bits,
    )


def _groups(stored: StoredTensor) -> Groups | None:
    """A stored matrix in groups of 32, or None when it is no quantised matrix of that shape."""
    if len(stored.shape) != 2 or stored.shape[1] % GROUP or not stored.dtype.startswith("Q"):
        return None
    groups = _grouped(stored)
    check_finite(groups.scale, stored.name)
    check_finite(groups.offset, stored.name)
    return groups


def _grouped(stored: StoredTensor) -> Groups:
    if stored.dtype in ("Q4_0", "Q4_1"):
        record = record_of_gguf(stored)
        assert record.offset is not None
        return Groups(record.nibbles(), record.scale, record.offset, 4)
    if stored.dtype == "Q8_0":
        blocks = stored.raw.reshape(stored.shape[0], -1, 34)
        scale = _half(blocks[:, :, :2])
        q = (blocks[:, :, 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8)
        return Groups(q.reshape(stored.shape), scale, -128 * scale, 8)
    values = stored.to_float32()
    check_finite(values, stored.name)
    return _requantized(values)


def _requantized(values: Floats) -> Groups:
    """Formats between four and eight bits, as eight bits: finer than what they were stored with."""
    grouped = values.reshape(len(values), -1, GROUP)
    scale = (np.abs(grouped).max(axis=-1) / 127).astype(np.float32)
    safe = np.where(scale == 0, 1, scale)[:, :, None]
    q = (np.rint(grouped / safe) + 128).astype(np.uint8).reshape(values.shape)
    return Groups(q, scale, -128 * scale, 8)


def _dense(groups: Groups) -> Floats:
    grouped = groups.q.reshape(*groups.scale.shape, GROUP).astype(np.float32)
    values: Floats = (grouped * groups.scale[:, :, None] + groups.offset[:, :, None]).reshape(groups.q.shape)
    return values


def _half(raw: Bytes) -> Floats:
    values: Floats = np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)
    return values
