"""Putting a runner on a GPU: the type to compute in, how much memory is left for keys and values, and what fits.

KV blocks get what is free once the weights are loaded, less the buffers of the largest step. Whatever the user gave
stays as given; what cannot fit is refused with the options that would make it fit.

A checkpoint's matrices are kept in the type the model computes in; those of the same type go over as they lie in the
file. Made-up weights are made up on the device: filling eight billion values on the host would take longer than
everything else a start does.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.config.engine import MADE_ON_LOADING, ModelConfig
from paceline.config.model_set import SharedMemory
from paceline.config.speculative import DRAFT_BUCKETS, read_speculative_config
from paceline.errors import ConfigError
from paceline.models.decoder import Parts
from paceline.models.files.head_folder import HeadFiles, HeadSpec, head_tensors
from paceline.models.files.open import MADE_UP, SPREAD, Checkpoint
from paceline.models.files.records import (
    FP8,
    GGUF_FOUR_BITS,
    INT4,
    INT8,
    KINDS,
    Floats,
    Record,
    record_of,
    record_of_gguf,
)
from paceline.models.files.stored import StoredTensor, check_finite, num_parameters
from paceline.models.layers import DenseLinear, Linear
from paceline.models.load import build_decoder
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.adapters import AdapterRoom
from paceline.runner.gpu.device_layers import (
    GroupedLinear,
    ScaledLinear,
    fits_eight_bits,
    fits_four_bits,
    fold_kv_scales,
    packed,
    packed_of,
    quantized,
)
from paceline.runner.gpu.drafts.device_head import DraftParts, further_layers
from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.block_product import BlockWeight
from paceline.runner.gpu.kernels.packed_product import PackedWeight
from paceline.runner.gpu.kernels.scaled_product import ScaledWeight
from paceline.runner.gpu.kv_pools import device_block_bytes, part_shape
from paceline.runner.gpu.row_memory import MOST_ROW_BYTES, row_bytes
from paceline.runner.gpu.slab_memory import Home, SlabMemory, choose_slab_bytes
from paceline.runner.sizing import CACHED_BYTES, CACHED_VECTORS, free_memory

_logger = logging.getLogger("paceline")
GIB = 1 << 30
RESERVE = 3 * GIB // 2  # graphs, workspaces of cuBLAS, the context
MOST_OF_HOST = 0.8  # of the memory that is available; pinned memory cannot be swapped out
ROW_SHARE = 64  # of the GPU's memory, that rows may take unless their number is given
LARGE_MEMORY = 64 * GIB  # from here on many rows and long steps are worth their buffers
LARGE_PICTURE = 16_384  # patches
_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_dtype(model: ModelConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The type the user names, else that of the weights; made-up and quantised ones are computed in bfloat16."""
    if model.quantization in MADE_ON_LOADING:
        if model.dtype not in ("auto", "bfloat16"):
            raise ConfigError(
                f"--quantization {model.quantization} computes in bfloat16: leave --dtype {model.dtype} out"
            )
        return torch.bfloat16
    if model.dtype != "auto":
        return _TYPES[model.dtype]
    is_half = "F16" in checkpoint.stored and not set(checkpoint.stored) & set(KINDS)
    return torch.float16 if is_half else torch.bfloat16


def choose_kv_dtype(model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The type keys and values are kept in: that of the arithmetic, or eight bits."""
    return dtype if model.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def load_parts(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    on_layer: Callable[[int, int], None] | None = None,
    quantization: str = "auto",
    kv_dtype: torch.dtype | None = None,
    home: Home | None = None,
) -> Parts:
    """The decoder's parts with every matrix on the device, in its `home` if it has one."""
    num_experts = 0 if checkpoint.spec.experts is None else checkpoint.spec.experts.num_experts
    storage = DeviceStorage(device, dtype, quantization, home, num_experts)
    try:
        parts = build_decoder(checkpoint, 2, storage, on_layer).parts
        if storage.unpacked and quantization == "auto":
            _logger.warning(
                "matrices of %s have 16 bits on the GPU: no product takes them as they are in the file",
                ", ".join(sorted(storage.unpacked)),
            )
        if kv_dtype == torch.float8_e4m3fn:
            fold_kv_scales(parts.layers, checkpoint.spec, checkpoint.kv_scales)
        if home is not None:
            torch.cuda.empty_cache()  # what was copied there
        return parts
    except torch.OutOfMemoryError as error:
        total = torch.cuda.get_device_properties(device).total_memory
        raise ConfigError(
            f"the weights do not fit into the GPU's {total / GIB:.0f} GiB: take a smaller model, or --device cpu"
        ) from error


def load_guesser(
    opened: HeadFiles | Checkpoint | None,
    device: torch.device,
    dtype: torch.dtype,
    on_layer: Callable[[int, int], None],
    quantization: str,
    kv_dtype: torch.dtype,
) -> HeadFiles | DraftParts | None:
    """What makes drafts, with a draft model's matrices on the device; computed in the model's own type."""
    if not isinstance(opened, Checkpoint):
        return opened
    return DraftParts(opened.spec, load_parts(opened, device, dtype, on_layer, quantization, kv_dtype))


def choose_gpu_sizes(
    model: ModelConfig,
    spec: ModelSpec,
    given: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    guesser: HeadFiles | DraftParts | None = None,
    adapters: AdapterRoom | None = None,
    shared: SharedMemory | None = None,
) -> dict[str, Any]:
    """`given` completed: every size the engine's config needs. `guesser` makes drafts; `adapters` have their own room;
    `shared`: of several models."""
    free, total = torch.cuda.mem_get_info(device)
    sizes = step_sizes(spec, given, total)
    per_block = device_block_bytes(spec, choose_kv_dtype(model, dtype), further_layers(guesser))
    longest = sizes.get("max_model_len", _longest(spec))
    if shared is not None:
        sizes = shared.sizes(sizes, per_block, longest, model.kv_cache_memory_bytes)
        longest = sizes["max_model_len"]
    elif "num_blocks" not in sizes:
        buffers = buffer_bytes(model, spec, sizes, dtype, guesser, adapters)
        usable = free - int(total * (1 - model.gpu_memory_utilization)) - buffers - RESERVE
        memory = model.kv_cache_memory_bytes or usable
        if memory < 2 * per_block:
            taken, options = (
                ("buffers", "") if adapters is None else ("buffers and adapters", "--max-loras, ")
            )
            raise ConfigError(
                f"after the weights {free / GIB:.1f} GiB of the GPU are free, {buffers / GIB:.1f} go to {taken} and "
                f"{max(memory, 0) / GIB:.1f} are left for the KV cache: raise --gpu-memory-utilization, or lower "
                f"{options}--max-num-seqs, --max-num-batched-tokens or --max-model-len"
            )
        sizes["num_blocks"] = memory // per_block
    if model.kv_offloading_size:
        sizes |= host_blocks(model.kv_offloading_size, per_block, spec, given)
    capacity = (sizes["num_blocks"] - 1) * BLOCK_SIZE
    if "max_model_len" not in sizes:
        longest = max(2, min(longest, capacity))
    if longest > capacity:
        raise ConfigError(
            f"the KV cache holds {capacity} tokens, less than --max-model-len {longest}: give a shorter length, or "
            "raise --gpu-memory-utilization"
        )
    sizes["max_model_len"] = longest
    return sizes


def step_sizes(spec: ModelSpec, given: Mapping[str, Any], total: int) -> dict[str, Any]:
    """`given` with the sizes of steps; `total`: bytes of the GPU."""
    sizes = dict(given)
    if sizes.setdefault("block_size", BLOCK_SIZE) != BLOCK_SIZE:
        raise ConfigError(f"--block-size {sizes['block_size']}: on a GPU blocks have {BLOCK_SIZE} tokens")
    is_large = total >= LARGE_MEMORY
    sizes.setdefault("max_num_batched_tokens", 12_288 if is_large else 8192)
    copies = sizes.setdefault("depth", 1) + 1
    longest = sizes.get("max_model_len", _longest(spec))
    if longest > _longest(spec):
        raise ConfigError(f"--max-model-len {longest} is longer than the model's {_longest(spec)} positions")
    affordable = total // ROW_SHARE // (copies * row_bytes(longest))
    rows = sizes.setdefault("max_num_seqs", max(1, min(1024 if is_large else 256, affordable)))
    most = MOST_ROW_BYTES // (copies * row_bytes(longest))
    if rows > most:
        raise ConfigError(
            f"--max-num-seqs {rows}: every row has room for --max-model-len {longest} tokens, and there can be {most} "
            "rows of that length: give fewer, or a shorter length"
        )
    return sizes


def buffer_bytes(
    model: ModelConfig,
    spec: ModelSpec,
    sizes: Mapping[str, Any],
    dtype: torch.dtype,
    guesser: HeadFiles | DraftParts | None,
    adapters: AdapterRoom | None,
) -> int:
    """What a model needs beside weights and KV: its step and rows, what guesses, adapters."""
    draws = slots = sizes["max_num_seqs"]
    if read_speculative_config(model.speculative_config) is not None:
        draws = max(draws, DRAFT_BUCKETS[-1])
    longest = sizes.get("max_model_len", _longest(spec))
    found: int = slots * (sizes["depth"] + 1) * row_bytes(longest)
    found += _step_bytes(spec, sizes, draws, dtype)
    if isinstance(guesser, HeadFiles):
        found += _head_bytes(guesser.spec, sizes, dtype)
    elif guesser is not None:
        found += _step_bytes(guesser.spec, sizes, slots, dtype)
    if adapters is not None:
        found += adapters.num_bytes(spec, max(sizes["max_num_batched_tokens"], slots) + slots, dtype)
    if spec.vision is not None and spec.vision.encoder is not None:
        found += _picture_bytes(spec.vision, model.encoder_cache_tokens, dtype)
    return found


def _picture_bytes(vision: ModelSpec, cached: int | None, dtype: torch.dtype) -> int:
    """The line of a large picture, and pages of vectors, about."""
    assert vision.encoder is not None and vision.encoder.patches is not None
    values = vision.encoder.patches.values
    unit = 4 * vision.hidden_size + (6 * vision.hidden_size + 3 * vision.intermediate_size) * dtype.itemsize
    vectors = cached or max(CACHED_VECTORS, CACHED_BYTES // (4 * values))
    return LARGE_PICTURE * unit + vectors * values * dtype.itemsize


def share_memory(
    models: Sequence[tuple[ModelConfig, Mapping[str, Any], Checkpoint]],
    memory_bytes: int | None,
    device: torch.device,
) -> tuple[SlabMemory, int]:
    """The memory of several models, and how many of its slabs are for KV, about: weights and adapters take the others.
    `memory_bytes`: of all of these; None: what the GPU has beside the steps of all models."""
    free, total = torch.cuda.mem_get_info(device)
    shapes, weights, adapters, left = [], 0, 0, free
    for model, given, checkpoint in models:
        spec, dtype = checkpoint.spec, choose_dtype(model, checkpoint)
        sizes = step_sizes(spec, given, total)
        drafts = read_speculative_config(model.speculative_config)
        if drafts is not None and drafts.model:
            raise ConfigError("a model beside others on a GPU makes no drafts with a model: leave it out")
        shapes.append(part_shape(spec, choose_kv_dtype(model, dtype)))
        weights += num_parameters(spec) * _BITS.get(model.quantization, 8 * dtype.itemsize) // 8
        room = AdapterRoom.of(model, given.get("max_loras", 0))
        pool = 0 if room is None else room.pool_bytes(spec, dtype)
        adapters += pool
        left -= buffer_bytes(model, spec, sizes, dtype, None, room) - pool + RESERVE
    utilization = min(model.gpu_memory_utilization for model, _, _ in models)
    usable = memory_bytes or left - int(total * (1 - utilization))
    slab_bytes = choose_slab_bytes(shapes)
    num_slabs = usable // slab_bytes
    kv_slabs = num_slabs - 1 - len(models) - (weights + adapters) // slab_bytes
    if kv_slabs < len(models):
        raise ConfigError(
            f"{free / GIB:.1f} GiB of the GPU are free, {usable / GIB:.1f} of them for weights and KV of "
            f"{len(models)} models, and the weights take {weights / GIB:.1f}, adapters {adapters / GIB:.1f}: take "
            "fewer or smaller models, or lower --max-loras, --max-num-seqs, --max-num-batched-tokens or --max-model-len"
        )
    try:
        return SlabMemory(num_slabs, slab_bytes, device), kv_slabs
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"memory_bytes of the models is {usable / GIB:.1f} GiB, and {free / GIB:.1f} of the GPU are free"
        ) from error


def host_blocks(
    gib: float, per_block: int, spec: ModelSpec, given: Mapping[str, Any]
) -> dict[str, int | bool]:
    """Sizes of the level below the device; raises where there can be none."""
    flag, room = f"--kv-offloading-size {gib:g}", free_memory()
    if given.get("num_host_blocks"):
        raise ConfigError(f"{flag} and --num-host-blocks {given['num_host_blocks']} say the same: give one")
    if any(window is not None for window in spec.group_windows):
        raise ConfigError(
            f"{flag}: prefixes of a model with sliding windows are not kept in host memory; for requests that are "
            "swapped out give --num-host-blocks"
        )
    if gib * GIB > MOST_OF_HOST * room:
        raise ConfigError(
            f"{flag} is more than {MOST_OF_HOST:.0%} of the {room / GIB:.1f} GiB of memory that is available: give at "
            f"most {MOST_OF_HOST * room / GIB:.1f}"
        )
    if gib * GIB < per_block:
        raise ConfigError(f"{flag} holds no KV block: one takes {per_block / GIB:.4f} GiB")
    return {"num_host_blocks": int(gib * GIB) // per_block, "cache_on_host": True}


def _longest(spec: ModelSpec) -> int:
    """Dynamic rotation changes with the length of a sequence beyond the trained one; the kernels have one table."""
    trained = [rope.trained_positions for rope in spec.ropes if rope.kind == "dynamic"]
    return min([spec.max_positions, *trained])


def _step_bytes(spec: ModelSpec, sizes: Mapping[str, Any], draws: int, dtype: torch.dtype) -> int:
    """What the buffers of the largest step take, about."""
    slots = sizes["max_num_seqs"]
    tokens = max(sizes["max_num_batched_tokens"], slots) + slots
    heads = spec.num_heads * spec.head_dim
    per_token = 3 * spec.hidden_size + 3 * heads + 2 * spec.num_kv_heads * spec.head_dim
    per_token += 3 * spec.intermediate_size
    logits = draws * (spec.vocab_size + spec.hidden_size) + slots * spec.vocab_size
    steps: int = (tokens * per_token + logits) * dtype.itemsize
    return steps


def _head_bytes(head: HeadSpec, sizes: Mapping[str, Any], dtype: torch.dtype) -> int:
    """The same for a head, and its weights: those of the model are loaded by then, the head's are not."""
    slots: int = sizes["max_num_seqs"]
    tokens: int = max(sizes["max_num_batched_tokens"], slots) + slots
    weights = sum(math.prod(shape) for _, shape in head_tensors(head))
    rows: int = slots * (sizes["depth"] + 2) * head.hidden_size
    return (weights + rows + tokens * 8 * head.hidden_size + slots * head.draft_vocab_size) * dtype.itemsize


_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


# What eight bits would harm most for what they spare.
_KEPT = ("embed_tokens.weight", "lm_head.weight")
_QUANTIZED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
BLOCK_GROUPS = (128, 64, 32)  # inputs that share a scale in products of e4m3
_FILES = {FP8: torch.float8_e4m3fn, INT8: torch.int8}
_BITS = {"fp8": 8, "int8": 8, "int4": 5}  # of a weight, about


class DeviceStorage:
    """Every matrix on `device` as `dtype`, or quantised there. A matrix that serves as embedding and as output is kept
    once, and never quantised."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "auto",
        home: Home | None = None,
        num_experts: int = 0,
    ) -> None:
        """`home`: where matrices are to lie; None: anywhere. `num_experts`: of a layer."""
        self._device, self._dtype = device, dtype
        self._home, self._num_experts = home, num_experts
        self._quantization = quantization
        self._eight_bits = _QUANTIZED.get(quantization)
        self._tables: dict[str, Tensor] = {}
        self.unpacked: set[str] = set()  # types of a file's matrices that no product takes as they are

    def linear(self, weights: Sequence[StoredTensor], bias: Tensor | None) -> Linear:
        if len(weights) == 1 and weights[0].name in self._tables:
            return DenseLinear(self._tables[weights[0].name])
        made = self._linear(weights, bias)
        return made if self._home is None else self._home.place(made, weights[0].name, self._num_experts)

    def _linear(self, weights: Sequence[StoredTensor], bias: Tensor | None) -> Linear:
        bias = None if bias is None else bias.to(self._device, self._dtype)
        kept = self._kept(weights)
        if isinstance(kept, ScaledWeight):
            return ScaledLinear(kept, bias)
        if kept is not None:
            return GroupedLinear(kept, bias)
        self.unpacked |= {
            weight.dtype for weight in weights if weight.dtype in KINDS or weight.dtype[0] in "QI"
        }
        parts = [self._moved(weight) for weight in weights]
        matrix = parts[0] if len(parts) == 1 else torch.cat(parts)
        name = weights[0].name
        fits = fits_four_bits if self._quantization == "int4" else fits_eight_bits
        if name.endswith(_KEPT) or (".experts." in name and not fits(*matrix.shape)):
            return DenseLinear(matrix, bias)
        if self._quantization == "int4":
            return GroupedLinear(self._four_bits(matrix, name), bias)
        if self._eight_bits is not None:
            return self._scaled(matrix, bias, name)
        return DenseLinear(matrix, bias)

    def embedding(self, weight: StoredTensor) -> Linear:
        # Only its table is used: `forward` picks rows of it.
        if weight.name not in self._tables:
            made = DenseLinear(self._moved(weight))
            if self._home is not None:
                self._home.place(made, weight.name)
            self._tables[weight.name] = made.weight
        return DenseLinear(self._tables[weight.name])

    def _kept(self, weights: Sequence[StoredTensor]) -> ScaledWeight | PackedWeight | BlockWeight | None:
        """Matrices as the file has them; None for those that no product takes, which are unpacked."""
        kinds = {INT4 if weight.dtype in GGUF_FOUR_BITS else weight.dtype for weight in weights}
        if (
            self._quantization == "none"
            or len(kinds) > 1
            or not kinds <= set(KINDS)
            or weights[0].name.endswith(_KEPT)
        ):
            return None
        records = [
            record_of_gguf(weight) if weight.dtype in GGUF_FOUR_BITS else record_of(weight)
            for weight in weights
        ]
        if kinds == {INT4}:
            for weight, record in zip(weights, records, strict=True):
                check_finite(record.scale, weight.name)
                check_finite(cast(Floats, record.offset), weight.name)
            return self._packed_records(records)
        groups = {record.scale.shape[1] for record in records}
        fits = len(groups) == 1 and all(fits_eight_bits(*record.q.shape) for record in records)
        if not fits or (self._device.type == "cuda" and self._dtype != torch.bfloat16):
            return None
        dtype = _FILES[kinds.pop()]
        for weight, record in zip(weights, records, strict=True):
            if dtype == torch.float8_e4m3fn and ((record.q & 127) == 127).any():
                check_finite(np.full(1, np.nan, np.float32), weight.name)
        q = torch.cat([torch.from_numpy(record.q) for record in records]).to(self._device)
        scale = torch.cat([torch.from_numpy(record.scale) for record in records]).to(self._device)
        if groups == {1}:
            return ScaledWeight(q.view(dtype), scale[:, 0].contiguous())
        fits = dtype == torch.float8_e4m3fn and q.shape[1] // scale.shape[1] in BLOCK_GROUPS
        return BlockWeight(q.view(dtype), scale.T.contiguous()) if fits else None

    def _packed_records(self, records: Sequence[Record]) -> PackedWeight | None:
        if len({record.scale.shape[1] for record in records}) > 1:
            return None
        if self._device.type == "cuda" and self._dtype != torch.bfloat16:
            return None
        numbers, scale, offset = (
            torch.cat([torch.from_numpy(np.ascontiguousarray(part)) for part in parts]).to(self._device)
            for parts in zip(*((each.nibbles(), each.scale, each.offset) for each in records), strict=True)
        )
        return packed_of(numbers, scale, offset, self._dtype)

    def _four_bits(self, matrix: Tensor, name: str) -> PackedWeight:
        self._check_fit(fits_four_bits(*matrix.shape), matrix, name, "16 and 64")
        made = packed(matrix, self._dtype)
        self._check_finite(made.pairs, name)
        return made

    def _check_fit(self, fits: bool, matrix: Tensor, name: str, steps: str) -> None:
        if not fits:
            raise ConfigError(
                f"--quantization {self._quantization}: {name} of {matrix.shape[0]} x {matrix.shape[1]} cannot be "
                f"quantised: its sizes must be multiples of {steps}"
            )

    def _check_finite(self, scale: Tensor, name: str) -> None:
        if not bool(scale.isfinite().all()):
            check_finite(np.full(1, np.nan, np.float32), name)

    def _scaled(self, matrix: Tensor, bias: Tensor | None, name: str) -> Linear:
        assert self._eight_bits is not None
        self._check_fit(fits_eight_bits(*matrix.shape), matrix, name, "16 and 32")
        made = quantized(matrix, self._eight_bits)
        self._check_finite(made.scale, name)
        return ScaledLinear(made, bias)

    def _moved(self, stored: StoredTensor) -> Tensor:
        if stored.dtype == MADE_UP:
            seed = hashlib.blake2b(stored.name.encode(), digest_size=7).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(seed, "little"))
            made = torch.empty(stored.shape, dtype=self._dtype, device=self._device)
            return made.normal_(0.0, SPREAD, generator=generator)
        kind = _STORED.get(stored.dtype)
        if kind is None or not stored.raw.size:
            values = np.ascontiguousarray(stored.to_float32())
            return torch.from_numpy(values).to(self._device, self._dtype)
        raw = torch.from_numpy(stored.raw if stored.raw.flags.writeable else np.array(stored.raw))
        return raw.view(kind).view(stored.shape).to(self._device, self._dtype)
