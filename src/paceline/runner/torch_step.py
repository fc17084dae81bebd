"""The reference: a step computed with plain torch in float32."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import KVConfig, ModelConfig
from paceline.core.counters import CPUWork
from paceline.core.standing import Pulse
from paceline.models.adapters import AdapterTables
from paceline.models.decoder import Decoder, SeenPictures
from paceline.models.draft_head import DraftNet
from paceline.models.files.open import Checkpoint
from paceline.models.load import DenseStorage, Storage
from paceline.models.quantized import QuantizedStorage, fast_product
from paceline.runner.attention import StepAttention
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.kv_tensors import KVTensors
from paceline.runner.pictures import Pictures
from paceline.runner.workers import Workers

Index = NDArray[np.int64]


class TorchStep:
    """A decoder over paged keys and values (`cpu.StepCompute`)."""

    def __init__(
        self,
        decoder: Decoder,
        config: KVConfig,
        workers: Workers | None = None,
        pulse: Pulse | None = None,
        net: DraftNet | None = None,
        kv_dtype: str = "float32",
        pictures: Pictures | None = None,
    ) -> None:
        """`net`: a model that guesses, whose keys are kept too and which reads hidden states."""
        self.pictures = pictures
        self.spec = decoder.spec
        self.kv = KVTensors(decoder.spec, config, () if net is None else net.layers, kv_dtype)
        self.adapters = AdapterTables(decoder.spec)
        self._decoder = decoder
        self._taps = () if net is None else net.taps
        self._tapped: dict[int, Tensor] = {}
        self.workers = workers if workers is not None else Workers()
        self._pulse = pulse if pulse is not None else Pulse()
        self._hidden = torch.zeros(0, decoder.spec.hidden_size)  # of the last batch

    @torch.inference_mode()
    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        numbers = rows.adapters_of(batch)
        with self.workers.step(len(batch.tokens)):
            attend = StepAttention(self.kv, rows, batch, scale=self.spec.softmax_scale, workers=self.workers)

            def attend_and_beat(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                self._pulse.beat()
                return attend(layer, queries, keys, values)

            self._tapped = dict.fromkeys(self._taps, self._hidden)
            self._hidden = self._decoder.forward(
                torch.from_numpy(batch.tokens),
                torch.from_numpy(batch.positions),
                torch.from_numpy(batch.lengths),
                attend_and_beat,
                self._tapped,
                None if numbers is None else self.adapters.of_tokens(numbers),
                self._seen(rows, batch),
            )
        good: NDArray[np.bool_] = torch.isfinite(self._hidden).all(dim=-1).numpy()
        return good

    def _seen(self, rows: DeviceRows, batch: FlatBatch) -> SeenPictures | None:
        if self.pictures is None:
            return None
        slots = self.pictures.slots(rows, batch)
        turns = self.pictures.turns(rows, batch) if self.spec.has_turns else None
        if slots is None and turns is None:
            return None
        places = np.zeros(0, np.int64) if slots is None else np.flatnonzero(slots >= 0)
        return SeenPictures(
            torch.from_numpy(places),
            torch.from_numpy(self.pictures.vectors[places if slots is None else slots[places]]),
            None if turns is None else torch.from_numpy(turns),
        )

    def seen(self) -> tuple[list[Tensor], Tensor]:
        """Of the tokens of the last batch: the hidden states that the guessing model reads, and the last one."""
        return [self._tapped[tap] for tap in self._taps], self._hidden

    def work(self) -> CPUWork:
        return CPUWork(threads=torch.get_num_threads())

    @torch.inference_mode()
    def logits(self, tokens: Index) -> NDArray[np.float32]:
        with self.workers.step(len(tokens)):
            found: NDArray[np.float32] = self._decoder.logits(self._hidden[torch.from_numpy(tokens)]).numpy()
        return found

    def states(self, batch: FlatBatch, index: int, *, only_last: bool) -> NDArray[np.float32]:
        end = int(batch.last[index]) + 1
        first = end - 1 if only_last else end - int(batch.count[index])
        found: NDArray[np.float32] = self._hidden[first:end].numpy()
        return found

    def classify(self, states: NDArray[np.float32], *, raw: bool) -> NDArray[np.float32]:
        raise AssertionError("a decoder has no labels")


def measure_step(decoder: Decoder, *, is_busy: bool = False) -> tuple[float, float]:
    """Seconds a step takes at least, and for each token more: a line through two sizes.

    On a busy machine it is the processor time of each thread: what a step would take if it had the cores, so that a
    start beside other processes gives the sizes of a quiet one and what steps really take is learned while serving.
    """
    small, large = 8, 40
    _time_tokens(decoder, small)  # the first run pays for threads and memory
    # The fastest of a few: others may be at work on the same cores.
    few, many = (
        min(_time_tokens(decoder, count, is_busy=is_busy) for _ in range(4)) for count in (small, large)
    )
    per_token = max((many - few) / (large - small), 1e-7)
    return max(few - small * per_token, 0.0), per_token


@torch.inference_mode()
def _time_tokens(decoder: Decoder, count: int, *, is_busy: bool = False) -> float:
    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return queries.flatten(1)

    tokens = torch.zeros(count, dtype=torch.int64)
    started_s, used_s = time.perf_counter(), time.process_time()
    decoder.logits(decoder.forward(tokens, tokens, tokens + 1, attend))
    took_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
    return min(took_s, used_s / torch.get_num_threads()) if is_busy else took_s


def choose_storage(model: ModelConfig, checkpoint: Checkpoint) -> tuple[Storage, tuple[str, ...]]:
    """The storage, and notices in sentences."""
    types = set(checkpoint.stored)
    is_quantized = any(name.startswith(("Q", "IQ")) for name in types)
    notices = []
    if model.dtype not in ("auto", "float32") or types & {"BF16", "F16"}:
        stored = "/".join(sorted(types & {"BF16", "F16"})) or model.dtype
        notices.append(f"{stored} weights are computed in float32: this machine's CPU is faster with it")
    if is_quantized and model.quantization == "auto":
        product = fast_product()
        if product is not None:
            return QuantizedStorage(product), tuple(notices)
        notices.append("quantised weights are unpacked to float32: torch has no fast product for them here")
    return DenseStorage(), tuple(notices)
