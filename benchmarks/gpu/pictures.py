"""Pictures on one card: Qwen2.5-VL-7B, made-up weights.

`encoder`: the line of one picture, launched whole, as a share of the products that the card sustains. `online`:
requests with pictures as the generator `mm-image` draws them, played into an engine in this process, with pictures
encoded in pieces and whole; `saturated`: as many of them at once; `repeated`: half of all pictures have come before.

    python -m benchmarks.gpu.pictures [--only encoder,online,saturated,repeated] [--seconds 45] [--json FILE]
"""

from __future__ import annotations

import gc
import json
import math
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Benchmark, Found, Given, flag, no_garbage_collection, rows_of
from paceline import LLM, SamplingParams
from paceline.core.stretch import MediaInput, MediaPart
from paceline.lab.workload.generators import mm_image
from paceline.lab.workload.workload import Workload
from paceline.models.files.open import open_checkpoint
from paceline.runner.gpu.device_queue import DeviceQueue
from paceline.runner.gpu.picture_encoder import DevicePictureEncoder

bench = Benchmark(__doc__)
CARD_TFLOPS = 689.0  # bf16, sustained
MARK, TEXT_IDS = 151_655, 151_000
PATCH_VALUES, MERGE, RATE = 3 * 14 * 14, 2, 9.5
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "image_token_id": MARK,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
    },
}
BYTES = np.random.default_rng(0).integers(0, 256, (16_384 + 64, PATCH_VALUES), np.uint8)


def picture(content: int, tokens: int) -> MediaInput:
    """One that becomes about this number of vectors."""
    rows = max(1, math.isqrt(tokens))
    columns = max(1, round(tokens / rows))
    units, first = MERGE * MERGE * rows * columns, content % 64
    return MediaInput(
        content=b"%d" % content,
        units=units,
        outputs=rows * columns,
        pixels=BYTES[first : first + units],
        grid=(1, MERGE * rows, MERGE * columns),
    )


# -- the encoder alone -------------------------------------------------------------------------------------


def encoder_lines(folder: Path) -> Iterator[Found]:
    queue = DeviceQueue(torch.device("cuda"))
    eyes = DevicePictureEncoder(
        open_checkpoint(folder, load_format="dummy"), queue=queue, dtype=torch.bfloat16, graphs=True
    )
    spec = eyes.spec
    for units in (256, 1024, 4096, 16_384):
        item = picture(0, units // MERGE**2)
        with queue.entered():
            line = eyes.begin([item])
        total = 2 * spec.num_layers * item.units
        whole_s = queue.seconds(partial(eyes.advance, line, 0, total))
        started_s = time.perf_counter()
        with queue.entered():
            eyes.advance(line, 0, total)
        launch_s = time.perf_counter() - started_s
        queue.drain()
        assert spec.encoder is not None
        seen = [64 if local else item.units for local in spec.encoder.local]
        products = 4 * spec.hidden_size**2 + 3 * spec.hidden_size * spec.intermediate_size
        flops = 2.0 * item.units * products * spec.num_layers
        flops += 4.0 * item.units * spec.hidden_size * sum(seen)
        yield {
            "patches": item.units,
            "ms": round(1e3 * whole_s, 2),
            "launched in ms": round(1e3 * launch_s, 2),
            "TFLOP/s": round(flops / whole_s / 1e12, 1),
            "share": round(flops / whole_s / 1e12 / CARD_TFLOPS, 3),
        }


# -- an engine ---------------------------------------------------------------------------------------------


class Play:
    """Requests of a workload in an engine, in real time or all at once."""

    def __init__(
        self, llm: LLM, workload: Workload, number: int, *, at_once: bool, repeats: bool = False
    ) -> None:
        """`number`: of the run; pictures of another one are others."""
        assert workload.images is not None
        self.engine, self.workload, self._at_once = llm.loaded.engine, workload, at_once
        self._first, self._tokens = workload.images.first, workload.images.tokens
        self._repeats, self._offset = repeats, number << 20
        random = np.random.default_rng(1)
        self._ids = random.integers(3, TEXT_IDS, 1 << 16)
        self.all_patches = self.encoded = 0
        eyes: Any = self.engine._runner._pictures._encoder  # type: ignore[attr-defined]
        self._begin = type(eyes).begin
        eyes.begin = partial(self._counted, eyes)

    def _counted(self, eyes: Any, items: list[MediaInput]) -> Any:
        self.encoded += sum(item.units for item in items)
        return self._begin(eyes, items)

    def _add(self, index: int) -> int:
        tokens: list[int] = []
        parts: list[MediaPart] = []
        for number in range(self._first[index], self._first[index + 1]):
            own = number // 2 if self._repeats else number
            given = picture(self._offset + own, int(self._tokens[own]))
            parts.append(MediaPart(len(tokens) + 1, given))
            tokens += [self._ids[number % 4096], *[MARK] * given.outputs]
            self.all_patches += given.units
        count = int(self.workload.text_len[index])
        start = (index * 977) % (len(self._ids) - count - 1)
        tokens += self._ids[start : start + max(1, count)].tolist()
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=int(self.workload.output_len[index]),
            ignore_eos=True,
            detokenize=False,
        )
        return int(self.engine.add(tokens, sampling, media=parts)[0])

    def run(self) -> Found:
        arrivals = self.workload.arrival_s.tolist()
        came: dict[int, float] = {}
        last: dict[int, float] = {}
        firsts: list[float] = []
        gaps: list[float] = []
        failed = done = at = 0
        began = time.perf_counter()
        while at < len(arrivals) or self.engine.has_requests or not self.engine.is_idle:
            now = time.perf_counter() - began
            while at < len(arrivals) and (self._at_once or arrivals[at] <= now):
                came[self._add(at)] = now if self._at_once else arrivals[at]
                at += 1
            if not self.engine.has_requests and self.engine.is_idle:
                time.sleep(max(0.0, arrivals[at] - (time.perf_counter() - began)))
                continue
            events = self.engine.step_overlapped()
            now = time.perf_counter() - began
            for told in events.tokens:
                for request in told.requests.tolist():
                    if request in last:
                        gaps.append(now - last[request])
                    else:
                        firsts.append(now - came[request])
                    last[request] = now
            done += len(events.finished)
            failed += sum(ended.reason.name not in ("LENGTH", "STOP") for ended in events.finished)
        seconds = time.perf_counter() - began
        first_ms, gap_ms = (1e3 * np.array(values) for values in (firsts, gaps))
        return {
            "requests": done,
            "failed": failed,
            "requests/s": round(done / seconds, 2),
            "TTFT p50 ms": round(float(np.quantile(first_ms, 0.5))),
            "TTFT p99 ms": round(float(np.quantile(first_ms, 0.99))),
            "ITL p50 ms": round(float(np.quantile(gap_ms, 0.5)), 1),
            "ITL p99 ms": round(float(np.quantile(gap_ms, 0.99)), 1),
            "encoded": round(self.encoded / self.all_patches, 3),
        }


def engines(folder: Path, given: Given, kinds: set[str]) -> Iterator[Found]:
    count = round(RATE * given.seconds)
    workload = mm_image(count, 0)
    for encode in ("pieces", "whole"):
        if encode == "whole" and "online" not in kinds:
            return
        options: dict[str, Any] = {"encode": encode, "step_target_ms": given.step_target_ms}
        with LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=32_768, **options
        ) as llm:
            print(llm.loaded.config.scheduler.encoder, flush=True)
            runs: dict[str, dict[str, bool]] = {
                "warm": {"at_once": True},
                "online": {"at_once": False},
                "saturated": {"at_once": True},
                "repeated": {"at_once": True, "repeats": True},
            }
            for number, (name, more) in enumerate(runs.items()):
                if name in ("saturated", "repeated") and (encode == "whole" or name not in kinds):
                    continue
                llm.reset_prefix_cache()
                played = mm_image(40, 7) if name == "warm" else workload
                with no_garbage_collection():
                    found = Play(llm, played, number, **more).run()
                if name != "warm":
                    yield {"encode": encode, "run": name, **found}
        del llm
        gc.collect()
        torch.cuda.empty_cache()


@bench.part(
    flag("--only", "encoder,online,saturated,repeated", "parts"),
    flag("--seconds", 45.0, "of arrivals"),
    flag("--step-target-ms", 14.0, "of steps with prompts or pictures"),
)
def pictures(given: Given) -> Found:
    kinds, result = set(given.only.split(",")), Found()
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        if "encoder" in kinds:
            result["encoder"] = rows_of(encoder_lines(folder))
            torch.cuda.empty_cache()
        if kinds - {"encoder"}:
            result["engine"] = rows_of(engines(folder, given, kinds))
    return result


if __name__ == "__main__":
    bench.main()
