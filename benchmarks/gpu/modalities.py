"""Vectors on one card, with made-up weights of real shapes: one table.

BERT-base with texts of 512 and of 64 tokens and Qwen3-Embedding-0.6B with texts of 512, through `LLM.embed` (the median
of some rounds); the same encoder without its engine, a step replayed or launched; what of that time attention, products
and the kernels between them take. `--http`: texts of 64 tokens from clients of a server. `--tiles`: attention with
other tiles than its own. `--long`: a prompt of 131,064 tokens to an 8B model, alone and beside 64 streams and four
short prompts a second.

    python -m benchmarks.gpu.modalities [--rounds 3] [--texts 2048] [--http] [--tiles] [--long] [--json FILE]
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.card import graph_microseconds, matrix_ceiling, read_ceiling
from benchmarks.gpu.encoder_cases import encoder_cases, tuned_cases
from benchmarks.gpu.kernels import timed
from benchmarks.harness import (
    HOST,
    Benchmark,
    Found,
    Given,
    flag,
    no_garbage_collection,
    row,
    rows_of,
    served,
    table,
)
from benchmarks.long_prompts import Load, on_a_server
from paceline import LLM
from paceline.lab.bench.shapes import SHAPES, write_words
from paceline.models.files.open import open_checkpoint
from paceline.runner.gpu.device_encoder import DeviceEncoder

bench = Benchmark(__doc__)
BERT_BASE: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": 30_522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
BERT_TOKEN_FLOPS = 2.0 * 12 * (4 * 768 * 768 + 2 * 768 * 3072)
CARD_TFLOPS = 689.0  # bf16, sustained
PROCESSES, INPUTS = 8, 32  # of the client; texts of a request


def folder_of(config: Any, where: str, name: str) -> Path:
    folder = Path(where, name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def texts(count: int, tokens: int) -> list[list[int]]:
    drawn: list[list[int]] = np.random.default_rng(0).integers(5, 30_000, (count, tokens)).tolist()
    return drawn


def embedded(folder: Path, pooling: str, cases: list[tuple[int, int]], rounds: int) -> Iterator[Found]:
    """Each case is a number of texts and their tokens."""
    longest = max(tokens for _, tokens in cases)
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "pooling": pooling}
    started_s = time.perf_counter()
    with LLM(str(folder), max_model_len=longest, **options) as llm:
        ready_s = time.perf_counter() - started_s
        for count, tokens in cases:
            prompts = texts(count, tokens)
            llm.embed(prompts[:256], use_tqdm=False)
            taken = []
            for number in range(rounds):
                # Other texts in each round: none is cached.
                shifted = [[(token + 7 * number) % 30_000 + 5 for token in prompt] for prompt in prompts]
                with no_garbage_collection():
                    started_s = time.perf_counter()
                    found = llm.embed(shifted, use_tqdm=False)
                    taken.append(time.perf_counter() - started_s)
                assert len(found) == count and all(np.isfinite(each.outputs.data).all() for each in found)
            median_s = statistics.median(taken)
            yield {
                "what": f"{folder.name}, {pooling}",
                "tokens": tokens,
                "texts": count,
                "texts/s": round(count / median_s),
                "tok/s": round(count * tokens / median_s),
                "slowest": round(count * tokens / max(taken)),
                "start s": round(ready_s, 1),
            }


def encoder_steps(folder: Path) -> Iterator[Found]:
    """Steps of the encoder alone, out of a graph: what the host adds is not in them."""
    checkpoint = open_checkpoint(folder, load_format="dummy")
    device = torch.device("cuda")
    encoder = DeviceEncoder(
        checkpoint, max_tokens=16_384, max_texts=1024, device=device, dtype=torch.bfloat16
    )
    with torch.inference_mode():
        for count, tokens in ((32, 512), (8, 512), (1, 512), (256, 64), (16, 64), (1, 64)):
            total = count * tokens
            counts = np.full(count, tokens)
            tiles = encoder.tiles(np.cumsum(counts) - counts, counts)
            ids = [np.array(text) for text in texts(count, tokens)]
            words = encoder.words(ids, [0] * count, tiles, total, len(tiles))
            encoder.put(torch.from_numpy(words).to(device))
            microseconds = graph_microseconds([partial(encoder.forward, total, len(tiles))])
            flops = total * (BERT_TOKEN_FLOPS + 4.0 * 12 * 768 * tokens)
            yield {
                "step": f"{count} x {tokens}",
                "us": round(microseconds, 1),
                "tok/s": round(total / microseconds * 1e6),
                "TFLOP/s": round(flops / microseconds / 1e6, 1),
                "share": round(flops / microseconds / 1e6 / CARD_TFLOPS, 3),
            }


# -- over HTTP -------------------------------------------------------------------------------------------------


def _client(port: int, number: int, seconds: float) -> tuple[int, float]:
    """Texts that were answered while it sent one request after the other, and the seconds."""
    inputs = np.random.default_rng(number).integers(5, 30_000, (INPUTS, 64)).tolist()
    body = json.dumps({"model": "m", "input": inputs, "encoding_format": "base64"}).encode()
    connection, count = http.client.HTTPConnection(HOST, port), 0
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        payload = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {payload[:300]!r}")
        count += INPUTS
    return count, time.perf_counter() - started_s


def over_http(folder: Path, seconds: float = 5.0) -> Found:
    options = [
        *("--model", str(folder), "--load-format", "dummy"),
        *("--pooling", "mean", "--served-model-name", "m"),
    ]
    write_words(folder, BERT_BASE["vocab_size"], BERT_BASE["pad_token_id"])
    with served(options) as server, ProcessPoolExecutor(PROCESSES) as processes:
        for length in (1.0, seconds):  # the first is not counted
            running = [processes.submit(_client, server.port, number, length) for number in range(PROCESSES)]
            found = [each.result() for each in running]
    rate = sum(count / taken for count, taken in found)
    return {"what": f"{folder.name} over HTTP", "tokens": 64, "texts/s": round(rate)}


@bench.part(
    flag("--rounds", 3, "runs of each case"),
    flag("--texts", 2048, "texts of 512 tokens in a round"),
    flag("--http", False, "also clients of a server"),
    flag("--tiles", False, "also attention with other tiles"),
    flag("--long", False, "also a prompt of 131,064 tokens"),
)
def modalities(given: Given) -> Found:
    result: Found = {}
    with tempfile.TemporaryDirectory() as where:
        bert = folder_of(BERT_BASE, where, "bert-base")
        qwen = folder_of(SHAPES["qwen3-0.6b"], where, "qwen3-embedding-0.6b")
        result["steps"] = rows_of(encoder_steps(bert))
        torch.cuda.empty_cache()
        cases = [(given.texts, 512), (8 * given.texts, 64)]
        result["embed"] = rows_of(embedded(bert, "mean", cases, given.rounds))
        torch.cuda.empty_cache()
        result["embed"] += rows_of(embedded(qwen, "last", [(given.texts, 512)], given.rounds))
        torch.cuda.empty_cache()
        if given.http:
            result["http"] = over_http(bert)
            row(*result["http"].values())
        if given.long:
            llama = folder_of(SHAPES["llama-3.1-8b"], where, "llama-3.1-8b")
            result["long prompts"] = rows_of(on_a_server(str(llama), Load()))
    read, matrix = read_ceiling()[0], matrix_ceiling()
    table("kernel", "shape", "us", "rate", "unit", "of the ceiling")
    result["kernels"] = []
    for source in (encoder_cases, *((tuned_cases,) if given.tiles else ())):
        for case in source():
            result["kernels"].append(timed(case, {"GB/s": read, "TFLOP/s": matrix}))
            row(*result["kernels"][-1].values())
            del case
            torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    bench.main()
