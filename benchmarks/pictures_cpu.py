"""A picture beside streams on this machine's CPU: SmolVLM-256M's shape, made-up weights.

Four streams decode, and a request with one tile of 512 x 512 pixels comes; then again with pictures encoded whole in
one step, and with a text prompt that takes as long by the engine's own prices. Gaps are those between the tokens of the
streams from the request's arrival to its first token. `alone`: its first token where nothing else runs, and where the
threads of the encoder spend that time.

    python -m benchmarks.pictures_cpu [--rounds 3] [--quantization int8] [--backend torch] [--only alone,pieces]
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, spread
from paceline import LLM, SamplingParams
from paceline.core.request import RequestId
from paceline.core.stretch import MediaInput, MediaPart

STREAMS, TEXT_TOKENS, SIDE, PATCH = 4, 24, 512, 16
KINDS = {"alone": "pieces", "pieces": "pieces", "text": "pieces", "whole": "whole"}  # by --encode
CONFIG = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "image_token_id": 49190,
    "scale_factor": 4,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": SIDE,
        "patch_size": PATCH,
    },
}
bench = Benchmark(__doc__)


def picture(seed: int) -> MediaInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (1, SIDE, SIDE, 3), np.uint8)
    grid = (1, SIDE // PATCH, SIDE // PATCH)
    units = grid[1] * grid[2]
    return MediaInput(content=b"%d" % seed, units=units, outputs=units // 16, pixels=pixels, grid=grid)


class Side:
    """One engine, with streams that decode for as long as it is asked."""

    def __init__(self, folder: Path, encode: str, given: Given) -> None:
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "cpu_threads": given.threads,
            "encode": encode,
        }
        options |= {"quantization": given.quantization, "cpu_backend": given.backend}
        self.llm = LLM(str(folder), load_format="dummy", max_model_len=8192, **options)
        self.engine = self.llm.loaded.engine
        self._seed = 0

    def add(self, tokens: int, max_tokens: int, *, sees: bool = False) -> RequestId:
        self._seed += 1
        prompt = np.random.default_rng(self._seed).integers(3, 49000, tokens).tolist()
        parts = [MediaPart(TEXT_TOKENS // 2, picture(self._seed))] if sees else []
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        return self.engine.add(prompt, sampling, media=parts)[0]

    def first_token(self, request: RequestId, others: set[RequestId]) -> tuple[float, list[float]]:
        """Seconds until its first token, and of the gaps between those of the others meanwhile."""
        began = last = time.perf_counter()
        gaps: list[float] = []
        while True:
            told = [number for each in self.engine.step().tokens for number in each.requests.tolist()]
            now = time.perf_counter()
            if others & set(told):
                gaps.append(now - last)
                last = now
            if request in told:
                return now - began, gaps

    def run(self, tokens: int, *, sees: bool, streams: int) -> tuple[float, list[float]]:
        others = {self.add(16, 4000) for _ in range(streams)}
        for _ in range(8 * bool(streams)):
            self.engine.step()
        found = self.first_token(self.add(tokens, 1, sees=sees), others)
        for other in others:
            self.engine.abort(other)
        while self.engine.has_requests or not self.engine.is_idle:
            self.engine.step()
        return found

    def phases(self) -> dict[str, float]:
        """Of the encoder: seconds of all threads until now."""
        pictures = self.engine._runner.compute.pictures  # type: ignore[attr-defined]
        return dict(pictures.work().phase_s)

    def since(self, before: dict[str, float]) -> dict[str, float]:
        return {phase: now - before.get(phase, 0.0) for phase, now in self.phases().items()}

    @property
    def equal_tokens(self) -> int:
        """Of a text prompt that takes as long as the picture's, by the engine's own prices."""
        work = self.llm.loaded.config.scheduler.encoder
        assert work is not None
        units = (SIDE // PATCH) ** 2
        return int(work.tokens(0, 2 * work.layers * units, units, units)) + units // 16 + TEXT_TOKENS


@bench.part(
    flag("--rounds", 3, "runs of each kind that are counted"),
    flag("--threads", 2, "that compute"),
    flag("--quantization", "auto", "none, int8 or int4 too"),
    flag("--backend", "auto", "native or torch"),
    flag("--only", ",".join(KINDS), "kinds of runs"),
)
def beside(given: Given) -> Found:
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for encode in ("pieces", "whole"):
            kinds = [kind for kind in given.only.split(",") if KINDS[kind] == encode]
            if kinds:
                side = Side(Path(folder), encode, given)
                found |= {"tokens_of_equal_work": side.equal_tokens} if encode == "pieces" else {}
                found |= measured(side, kinds, given.rounds)
                side.engine.close()
    return found


def measured(side: Side, kinds: list[str], rounds: int) -> Found:
    """Runs in turns; the first of each is not counted."""
    tokens = TEXT_TOKENS + (SIDE // PATCH) ** 2 // 16
    runs: dict[str, Callable[[], tuple[float, list[float]]]] = {
        "alone": lambda: side.run(tokens, sees=True, streams=0),
        "pieces": lambda: side.run(tokens, sees=True, streams=STREAMS),
        "text": lambda: side.run(side.equal_tokens, sees=False, streams=STREAMS),
        "whole": lambda: side.run(tokens, sees=True, streams=STREAMS),
    }
    taken: dict[str, list[tuple[float, list[float]]]] = {kind: [] for kind in kinds}
    spent: list[dict[str, float]] = []
    for number in range(rounds + 1):
        for kind in kinds:
            before, result = side.phases(), runs[kind]()
            if number:
                taken[kind].append(result)
                spent += [side.since(before)] if kind == "alone" else []
    found: Found = {}
    for kind, results in taken.items():
        found[kind] = {"first_token_s": spread([first for first, _ in results])}
        if results[0][1]:
            quantiles = [float(np.quantile(gaps, 0.99)) * 1000 for _, gaps in results]
            found[kind] |= {"gap_p99_ms": spread(quantiles, 0), "gaps": [len(gaps) for _, gaps in results]}
    if spent:
        found["alone"]["phase_s"] = {
            phase: round(float(np.median([each[phase] for each in spent])), 3) for phase in spent[0]
        }
    return found


if __name__ == "__main__":
    bench.main()
