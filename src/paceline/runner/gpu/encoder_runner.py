"""The runner of an encoder on a GPU: texts go down when their last token is scheduled, vectors come back one step late.

There is no KV and nothing is drawn. A step is computed in parts that the device's buffers hold; a part is launched in
the next larger of a few sizes, and up to some thousand tokens replayed from a graph. Nothing waits for the device but
`wait`. It knows rows and numbers, never a text.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from paceline.config.engine import MADE_ON_LOADING, EngineConfig, ModelConfig
from paceline.config.sized import engine_config, with_pools
from paceline.core.guide import Guide
from paceline.core.parameters import CLASSIFY, LAST, MEAN, PoolingParams
from paceline.core.plan import EMPTY, RUNNING_ON, RowVector, Runner, StepPlan, StepResult, StepTimes
from paceline.core.standing import HOST_LOST
from paceline.errors import ConfigError
from paceline.models.files.open import Checkpoint
from paceline.models.files.stored import TensorSource
from paceline.runner.cpu_backend import classifier_head, encoder_pools
from paceline.runner.device_rows import DeviceRows
from paceline.runner.encoder_step import ClassifierHead, parts_of
from paceline.runner.gpu.build import LARGE_MEMORY, choose_dtype
from paceline.runner.gpu.compile import compiling_only, watch_compilations
from paceline.runner.gpu.device_encoder import DeviceEncoder
from paceline.runner.gpu.device_pooling import PooledRow, padded_runs, to_device, to_host
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.graphs import TOKEN_BUCKETS, EncodeKey, StepGraphs, slot_bucket
from paceline.runner.gpu.kernels.span_sums import span_sums
from paceline.runner.sizing import encoder_sizes

Index = NDArray[np.int64]
F32 = NDArray[np.float32]
SIZES, LARGE_SIZES = (256, 8192), (1024, 16_384)  # rows and tokens of a step, the second with much memory
LARGE_PART = 256  # parts too large to be replayed have a multiple of this number of tokens


class DeviceClassifier:
    """Scores of the labels of texts before softmax or sigmoid, in float32."""

    def __init__(self, head: ClassifierHead, device: torch.device) -> None:
        self._head = head
        self._values = {name: torch.from_numpy(value).to(device) for name, value in head.values.items()}

    def logits(self, states: Tensor) -> Tensor:
        """[texts, labels] of the state that is read of each, [texts, width]."""
        head, values = self._head, self._values
        inner = F.linear(states, values["dense"], values["dense_bias"])
        inner = inner.tanh() if head.options.head_activation == "tanh" else F.gelu(inner)
        if "norm" in values:
            inner = F.layer_norm(inner, inner.shape[1:], values["norm"], None, head.eps)
        return F.linear(inner, values["scores"], values["scores_bias"])


@dataclass(slots=True, eq=False)
class EncodedPart:
    """Texts that were computed together, on their way to the host."""

    texts: list[PooledRow]
    states: Tensor  # [texts, width]: sums of states
    logits: Tensor | None  # [texts, labels]

    def read(self, index: int) -> F32 | None:
        """What a text came to; None: its numbers are not usable."""
        pooled, source = self.texts[index], self.states
        if pooled.wanted.kind == CLASSIFY:
            assert self.logits is not None
            source = self.logits
        values: F32 = source[index].numpy()
        if not np.isfinite(values).all():
            return None
        if pooled.wanted.kind != CLASSIFY:
            return pooled.vector(values)
        return ClassifierHead.scored(values, raw=pooled.wanted.raw)


@dataclass(slots=True, kw_only=True, eq=False)
class EncodedPending:
    """A submitted step."""

    plan: StepPlan
    rows: NDArray[np.int32]
    generation: NDArray[np.int32]
    parts: list[EncodedPart]
    done: Mark
    started_s: float

    def supply(self, guides: Mapping[int, Guide]) -> None:
        return None

    def wait(self) -> StepResult:
        self.done.wait()
        vectors, finite = [], np.ones(len(self.rows), np.bool_)
        for part in self.parts:
            for index, pooled in enumerate(part.texts):
                values = part.read(index)
                if values is not None:
                    vectors.append(RowVector(pooled.row, values))
                else:
                    finite[self.rows == pooled.row] = False
        out, back = self.plan.swap_out.ticket, self.plan.swap_in.ticket
        count = len(self.rows)
        return StepResult(
            seq=self.plan.seq,
            rows=self.rows,
            generation=self.generation,
            tokens=np.zeros((count, 1), np.int32),
            count=np.zeros(count, np.int32),
            finished=np.full(count, RUNNING_ON, np.uint8),
            finite=finite,
            copies_done=np.unique(np.concatenate([out, back])) if len(out) or len(back) else EMPTY,
            times=StepTimes(start_s=self.started_s, end_s=time.perf_counter()),
            vectors=tuple(vectors),
        )


class EncoderRunner:
    """Computes plans of an encoder on one GPU."""

    def __init__(
        self,
        config: EngineConfig,
        encoder: DeviceEncoder,
        head: ClassifierHead | None,
        *,
        device: torch.device,
        graphs: bool = True,  # output does not depend on it
    ) -> None:
        self._config, self._encoder, self._head = config, encoder, head
        self._queue = DeviceQueue(device)
        self._device_head = None if head is None else DeviceClassifier(head, device)
        self._rows = DeviceRows(config)
        self._wanted: dict[int, PoolingParams] = {}
        self._next_seq = 1
        self._graphs = StepGraphs()
        self._sizes = [size for size in TOKEN_BUCKETS if size <= encoder.max_tokens]
        self._prepare(graphs)

    def _prepare(self, graphs: bool) -> None:
        """Run every kind of part, and capture the small ones."""
        self._queue.drain()
        encoder, queue = self._encoder, self._queue
        with queue.entered():
            if queue.is_gpu:
                with compiling_only():
                    self._warm_up()
                encoder.warm_up(range(LARGE_PART, encoder.max_tokens + 1, LARGE_PART))
                self._warm_up()
            if graphs and queue.stream is not None:
                steps = [(EncodeKey(size), partial(self._forward, size)) for size in self._sizes]
                self._graphs.capture(steps, queue.stream)
        queue.drain()
        watch_compilations()

    def _warm_up(self) -> None:
        longest = min(self._encoder.max_tokens, self._config.scheduler.max_model_len)
        wanted = PoolingParams(kind=MEAN if self._head is None else CLASSIFY)
        for count in {1, longest}:
            text = np.zeros(count, np.int64)
            self._part([PooledRow(0, wanted, count)], [text], [0])

    # -- the runner seam -------------------------------------------------------------------------------------

    def reset(self, full: StepPlan) -> None:
        self._queue.drain()
        self._next_seq = full.seq + 1
        self._rows = DeviceRows(self._config)
        self._wanted.clear()
        self._apply(full)

    def submit(self, plan: StepPlan) -> EncodedPending:
        assert plan.seq == self._next_seq, f"plan {plan.seq} after {self._next_seq - 1}"
        self._next_seq += 1
        started_s, rows = time.perf_counter(), self._rows
        self._apply(plan)
        at = plan.spans.row.astype(np.int64)
        rows.computed[at] += plan.spans.num_scheduled
        whole = at[rows.computed[at] >= rows.num_tokens[at]]
        sizes = rows.num_tokens[whole]
        with self._queue.entered():
            parts = [
                self._rows_part(whole[part])
                for part in parts_of(list(range(len(whole))), sizes, self._encoder.max_tokens)
            ]
            done = self._queue.mark()
        return EncodedPending(
            plan=plan,
            rows=at.astype(np.int32),
            generation=rows.generation[at],
            parts=parts,
            done=done,
            started_s=started_s,
        )

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.leaves.tolist():
            self._wanted.pop(row, None)
        self._rows.apply(plan)
        for row, sampling in zip(plan.joins.row.tolist(), plan.joins.sampling, strict=True):
            assert sampling.pooling is not None, "an encoder makes vectors"
            self._wanted[row] = sampling.pooling
            self._rows.second_at[row] = sampling.pooling.second_at

    # -- a part of a step --------------------------------------------------------------------------------------

    def _rows_part(self, at: Index) -> EncodedPart:
        rows = self._rows
        pooled = [PooledRow(row, self._wanted[row], rows.num_tokens.item(row)) for row in at.tolist()]
        texts = [rows.tokens[each.row, : each.num_tokens] for each in pooled]
        return self._part(pooled, texts, rows.second_at[at].tolist())

    def _part(self, pooled: list[PooledRow], texts: list[Index], seconds: list[int]) -> EncodedPart:
        """Compute texts together."""
        queue, encoder, width = self._queue, self._encoder, self._encoder.spec.hidden_size
        counts = np.array([len(text) for text in texts])
        starts = np.cumsum(counts) - counts
        tiles = encoder.tiles(starts, counts)
        size, num_tiles = self._size(int(counts.sum()), len(tiles))
        encoder.put(to_device(encoder.words(texts, seconds, tiles, size, num_tiles), queue))
        if num_tiles != encoder.most_tiles(size) or not self._graphs.replay(EncodeKey(size)):
            encoder.forward(size, num_tiles)
        runs = [
            (index, *self._run(each, start))
            for index, (each, start) in enumerate(zip(pooled, starts.tolist(), strict=True))
        ]
        count = len(pooled)
        sums = torch.zeros(slot_bucket(count, encoder.max_texts), width, device=queue.device)
        span_sums(sums, encoder.hidden, to_device(padded_runs(runs), queue))
        logits = None
        if self._device_head is not None and any(each.wanted.kind == CLASSIFY for each in pooled):
            states = sums
            if self._reads_mean:
                lengths = np.ones((len(sums), 1), np.int32)
                lengths[:count, 0] = counts
                states = sums / to_device(lengths, queue)
            logits = to_host(self._device_head.logits(states)[:count], queue)
        return EncodedPart(pooled, to_host(sums[:count], queue), logits)

    @property
    def _reads_mean(self) -> bool:
        return self._head is not None and self._head.options.head_mean

    def _run(self, pooled: PooledRow, start: int) -> tuple[int, int, int]:
        """Which tokens of a text that begins at `start` are summed: the first, how many, and that none were before."""
        kind, count = pooled.wanted.kind, pooled.num_tokens
        if kind == MEAN or (kind == CLASSIFY and self._reads_mean):
            return start, count, 0
        return (start + count - 1 if kind == LAST else start), 1, 0

    def _size(self, num_tokens: int, num_tiles: int) -> tuple[int, int]:
        """At which size a part is computed, and for how many tiles: one that has been seen at the start."""
        encoder = self._encoder
        if not self._queue.is_gpu:
            return num_tokens, num_tiles
        for size in self._sizes:
            if size >= num_tokens:
                most = encoder.most_tiles(size)
                return size, most if num_tiles <= most else num_tiles
        up = -(-num_tokens // LARGE_PART) * LARGE_PART
        return max(num_tokens, min(up, encoder.max_tokens)), num_tiles

    def _forward(self, size: int) -> None:
        self._encoder.forward(size, self._encoder.most_tiles(size))


class EncoderSleeper:
    """An encoder over its sleeps. Its weights are small: they go at either level, and a wake reads their file again."""

    on_gpu, levels_lost = True, HOST_LOST

    def __init__(self, make: Callable[[], EncoderRunner]) -> None:
        self._make = make
        self._runner: EncoderRunner | None = None

    def open(self) -> Runner:
        self._runner = self._make()
        return self._runner

    def let_go(self, level: int) -> None:
        self._runner = None
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def open_encoder(
    model: ModelConfig, given: Mapping[str, Any], checkpoint: Checkpoint
) -> tuple[EngineConfig, EncoderSleeper, str, torch.dtype]:
    """An encoder on this machine's GPU: its sizes, what opens it, the GPU's name and the type it computes in."""
    if model.quantization in MADE_ON_LOADING:
        raise ConfigError(
            f"--quantization {model.quantization}: on a GPU an encoder is computed in 16 bits; leave it out, or add "
            "--device cpu for int8"
        )
    device, spec = torch.device("cuda", torch.cuda.current_device()), checkpoint.spec
    is_large = torch.cuda.mem_get_info(device)[1] >= LARGE_MEMORY
    rows, budget = LARGE_SIZES if is_large else SIZES
    sizes = encoder_sizes(spec, given, lambda: budget, rows=rows, depth=1)
    config = with_pools(engine_config(spec.group_windows, sizes), encoder_pools(spec), only=True)
    dtype, head = choose_dtype(model, checkpoint), classifier_head(checkpoint)
    load = partial(load_encoder, config, checkpoint, head, device=device, dtype=dtype)
    sleeper = EncoderSleeper(partial(load, graphs=not model.enforce_eager))
    return config, sleeper, torch.cuda.get_device_name(device), dtype


def load_encoder(
    config: EngineConfig,
    source: TensorSource,
    head: ClassifierHead | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    graphs: bool,
) -> EncoderRunner:
    """Weights on the device, and the runner around them."""
    texts, scheduler = config.scheduler.max_num_seqs, config.scheduler
    max_tokens = max(scheduler.max_num_batched_tokens, scheduler.max_model_len)
    encoder = DeviceEncoder(source, max_tokens=max_tokens, max_texts=texts, device=device, dtype=dtype)
    return EncoderRunner(config, encoder, head, device=device, graphs=graphs)
