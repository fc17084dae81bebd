"""What structured answers cost beside the model.

*check*: the schemas of Kubernetes (of the development package kubernetes-validate), with the definitions they refer to
written into them, as far as they have at most 64 KiB: how many compile leniently, and how long the check of a request
takes for each, in one process.

*masks*: the time of a mask on one core. Answers of random allowed tokens follow some of the same schemas.

*together*: milliseconds in which guides of a batch are moved on and asked, by the number of threads; 1: without a pool.
All stand in a string of the same schema, and the threads have slept before, as they have beside a GPU.

    python -m benchmarks.structures check [--release v1.31.0]
    python -m benchmarks.structures masks [--model FOLDER|FILE] [--schemas 40] [--tokens 100]
    python -m benchmarks.structures together [--shape qwen3-0.6b] [--rows 16,64,256] [--threads 1,2,4,8,14]
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, in_turns, row, table
from paceline.core.structure import Structure
from paceline.errors import GrammarTooComplex
from paceline.lab.bench.shapes import SHAPES, write_shape, write_tokenizer
from paceline.models.files.fetch import resolve
from paceline.models.files.open import open_checkpoint
from paceline.text.guide.check import verdict_of
from paceline.text.guide.grammar import grammar_of
from paceline.text.guide.matcher import GrammarCompiler, GuideBatch
from paceline.text.tokenizer import Tokenizer
from paceline.text.vocabulary import vocabulary_of

bench = Benchmark(__doc__)


def kubernetes_schemas(release: str) -> Iterator[tuple[str, Structure]]:
    """Name and structure of each schema that is small enough."""
    import kubernetes_validate

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"{release}-local"
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    for path in sorted(folder.glob("*.json")):
        if path.stem in ("_definitions", "all"):
            continue
        try:
            yield path.stem, Structure.named("json", _inlined(json.loads(path.read_text()), definitions, ()))
        except GrammarTooComplex:
            continue


def _inlined(value: Any, definitions: dict[str, Any], inside: tuple[str, ...]) -> Any:
    """A schema with definitions in the place of references; one inside itself may be anything."""
    if isinstance(value, list):
        return [_inlined(each, definitions, inside) for each in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str):
        name = reference.rpartition("/")[2]
        if name in inside:
            return {}
        return _inlined(definitions[name], definitions, (*inside, name))
    return {name: _inlined(each, definitions, inside) for name, each in value.items()}


@bench.part(flag("--release", "v1.31.0", "of Kubernetes"))
def check(given: Given) -> Found:
    """The share of schemas that compile, and the time of a check."""
    seconds, faults = [], []
    for name, structure in kubernetes_schemas(given.release):
        begun_s = time.perf_counter()
        verdict = verdict_of(structure)
        seconds.append(time.perf_counter() - begun_s)
        if verdict.error:
            faults.append(f"{name}: {verdict.error}")
    times = [1e3 * float(np.percentile(seconds, share)) for share in (50, 99, 100)]
    print(f"{len(seconds)} schemas, {len(seconds) - len(faults)} compile")
    print("check ms: p50 {:.1f}, p99 {:.1f}, longest {:.1f}".format(*times))
    print(*faults, sep="\n")
    return {
        "schemas": len(seconds),
        "share": 1 - len(faults) / len(seconds),
        "check_ms": dict(zip(("p50", "p99", "max"), times, strict=True)),
    }


@bench.part(
    flag("--model", None, "folder or GGUF file (default: SmolLM2-135M-Instruct)"),
    flag("--release", "v1.31.0", "of Kubernetes"),
    flag("--schemas", 40, "of them, spread over all"),
    flag("--tokens", 100, "most of an answer"),
)
def masks(given: Given) -> Found:
    """The time of a mask."""
    vocabulary = vocabulary_of(Tokenizer.from_checkpoint(open_checkpoint(resolve(given.model, None, None))))
    compiler, draw = GrammarCompiler(vocabulary), random.Random(1)
    structures = [structure for _, structure in kubernetes_schemas(given.release)]
    seconds: list[float] = []
    for structure in structures[:: max(1, len(structures) // given.schemas)]:
        if verdict_of(structure).error:
            continue
        matcher = compiler.compile(grammar_of(structure, vocabulary.control.get))
        for _ in range(given.tokens):
            if matcher.is_over or matcher.error:
                break
            begun_s = time.perf_counter()
            mask = matcher.mask()
            seconds.append(time.perf_counter() - begun_s)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            matcher.consume([int(draw.choice(allowed))])
    micros = [1e6 * each for each in seconds]
    found = {
        "masks": len(micros),
        "mean_us": statistics.mean(micros),
        "p50_us": float(np.percentile(micros, 50)),
        "p99_us": float(np.percentile(micros, 99)),
    }
    print("{masks} masks, us: mean {mean_us:.0f}, p50 {p50_us:.0f}, p99 {p99_us:.0f}".format(**found))
    return {"vocabulary": len(vocabulary.bytes_of), **found}


ROUNDS, REST_S = 60, 0.001
LIST = {"type": "array", "minItems": 200, "items": {"type": "string"}}


@bench.part(
    flag("--shape", "qwen3-0.6b", "whose vocabulary", choices=tuple(SHAPES)),
    flag("--rows", "16,64,256"),
    flag("--threads", "1,2,4,8,14"),
)
def together(given: Given) -> Found:
    """The time of a batch of guides, by the number of threads."""
    with tempfile.TemporaryDirectory() as folder:
        write_shape(given.shape, Path(folder))
        write_tokenizer(given.shape, Path(folder))
        tokenizer = Tokenizer.from_checkpoint(open_checkpoint(Path(folder), load_format="dummy"))
    vocabulary = vocabulary_of(tokenizer)
    compiler, grammar = GrammarCompiler(vocabulary), grammar_of(Structure.of({"json": LIST}), lambda _: None)
    originals = [compiler.compile(grammar) for _ in range(16)]
    for original in originals:
        original.consume(vocabulary.encode('["a'))
    (letter,) = vocabulary.encode("a")
    found: Found = {}
    table("rows", "threads", "moved on, ms", "asked, ms")
    for rows in map(int, given.rows.split(",")):
        guides = [originals[number % 16].copy() for number in range(rows)]
        masks = np.zeros((rows, vocabulary.num_words), np.uint32)
        tokens = np.full(rows, letter, np.int32)
        for threads in map(int, given.threads.split(",")):
            batch = GuideBatch(guides, threads)
            works: dict[str, Callable[[], object]] = {
                "moved": partial(batch.consume, tokens),
                "asked": partial(batch.fill_masks, masks),
            }
            taken = in_turns({name: partial(_after_rest_s, work) for name, work in works.items()}, ROUNDS)
            figures = [1e3 * statistics.median(seconds) for seconds in taken.values()]
            found[f"{rows} rows, {threads} threads"] = figures
            row(rows, threads, *figures)
    return found


def _after_rest_s(work: Callable[[], object]) -> float:
    time.sleep(REST_S)
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    bench.main()
