"""A GGUF model through the engine against transformers with the same numbers: greedy text and perplexity.

Text: prompts of English, continued greedily, in one batch here and one at a time there. Perplexity: a file cut into
windows, through `prompt_logprobs`; in float32 and with the quantised product of this machine. The last line is JSON.

    python -m benchmarks.parity_smollm2 --text FILE [--model FILE.gguf] [--tokens 20000] [--prompts 50]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.decoder import Decoder
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.load import Storage, build_decoder
from paceline.models.quantized import QuantizedStorage, fast_product
from paceline.runner.cpu import CPURunner
from paceline.text.tokenizer import Tokenizer
from tests.torch.english_prompts import PROMPTS
from tests.torch.gguf_reference import smollm2_path, transformers_model
from tests.torch.parity import TOLERANCE, Reference, greedy_reference

NUM_NEW = 24
WINDOW = 512
Table = dict[str, Any]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    checkpoint = open_checkpoint(options.model)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    windows = _windows(tokenizer, options)
    prompts = [tokenizer.encode(text) for text in PROMPTS[: options.prompts]]
    results: Table = {
        "model": Path(options.model).name,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "tokens": sum(len(window) - 1 for window in windows),
    }
    references, their_loss = _of_transformers(checkpoint, prompts, windows, results)
    storages: dict[str, Storage | None] = {"float32": None}
    product = fast_product()
    if product is not None and not options.float32_only:
        storages["quantised"] = QuantizedStorage(product)
    for name, storage in storages.items():
        decoder = build_decoder(checkpoint, WINDOW + 2, storage)
        outputs = _timed(results, f"{name} text", partial(generate, decoder, prompts))
        _note_text(results, name, references, outputs)
        loss = _timed(results, f"{name} perplexity", partial(mean_loss, decoder, windows))
        results[f"{name} perplexity"] = math.exp(loss)
        results[f"{name} perplexity off by %"] = 100 * (math.exp(loss - their_loss) - 1)
    for key, value in results.items():
        print(f"{key:32} {value:.5g}" if isinstance(value, float) else f"{key:32} {value}")
    print(json.dumps(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", default=smollm2_path(), help="a GGUF file (default: SmolLM2 where it is found)"
    )
    parser.add_argument("--text", type=Path, required=True, help="the text whose perplexity is measured")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32-only", action="store_true")
    options = parser.parse_args()
    if options.model is None:
        parser.error("SmolLM2 is not on this machine: name a GGUF file with --model")
    return options


def _windows(tokenizer: Tokenizer, options: argparse.Namespace) -> list[list[int]]:
    """The text cut into pieces, so many that `--tokens` tokens are predicted; each begins as the model expects it."""
    ids = tokenizer.encode(options.text.read_text()[: 8 * options.tokens], add_special_tokens=False)
    first = tokenizer.encode("")  # what every text begins with
    size = WINDOW - len(first)
    predicted = size if first else size - 1
    count = -(-options.tokens // predicted)
    windows = [first + ids[index * size : (index + 1) * size] for index in range(count)]
    assert len(windows[-1]) > 1, "the text is too short for so many tokens"
    return windows


def _of_transformers(
    checkpoint: Checkpoint, prompts: Sequence[list[int]], windows: Sequence[list[int]], results: Table
) -> tuple[list[Reference], float]:
    model = transformers_model(checkpoint)
    eos = checkpoint.spec.eos_token_ids
    references = _timed(
        results,
        "transformers text",
        lambda: [greedy_reference(model, prompt, NUM_NEW, eos) for prompt in prompts],
    )
    loss = _timed(results, "transformers perplexity", lambda: _their_loss(model, windows))
    results["transformers perplexity"] = math.exp(loss)
    return references, loss


def _their_loss(model: Any, windows: Sequence[list[int]]) -> float:
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in windows:
            logits = model(torch.tensor([window])).logits[0, :-1].double()
            targets = torch.tensor(window[1:])
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
    return total / count


def generate(decoder: Decoder, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Greedy continuations, all prompts in one engine at once."""
    engine = _engine(decoder, budget=256)
    sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
    heard: dict[int, list[int]] = {engine.add(prompt, sampling)[0]: [] for prompt in prompts}
    while engine.has_requests:
        for batch in engine.step_overlapped().tokens:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                heard[request].append(token)
    return [tuple(tokens) for tokens in heard.values()]


def mean_loss(decoder: Decoder, windows: Sequence[list[int]]) -> float:
    """Mean negative log-likelihood of the windows' tokens, through `prompt_logprobs`."""
    engine = _engine(decoder, budget=WINDOW)
    total, count = 0.0, 0
    for window in windows:
        engine.add(window, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        while engine.has_requests:
            for event in engine.step().logprobs:
                total -= event.logprobs.logprob
                count += 1
    assert count == sum(len(window) - 1 for window in windows)
    return total / count


def _engine(decoder: Decoder, budget: int) -> Engine:
    groups = tuple(GroupSpec(window=window) for window in decoder.spec.group_windows)
    config = EngineConfig(
        kv=KVConfig(block_size=16, num_blocks=1000, groups=groups),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=budget, max_model_len=WINDOW + 1),
    )
    return build_engine(config, CPURunner(config, decoder))


def _note_text(
    results: Table, name: str, references: Sequence[Reference], outputs: Sequence[tuple[int, ...]]
) -> None:
    """How many texts are the same word for word, and how many first differ where transformers itself was undecided."""
    same, undecided, tokens_before = 0, 0, 0
    for reference, output in zip(references, outputs, strict=True):
        pairs = zip(output, reference.output, strict=False)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is None and len(output) == len(reference.output):
            same += 1
            tokens_before += len(output)
        elif first is not None:
            undecided += reference.gaps[first] < TOLERANCE
            tokens_before += first
    results[f"{name} texts"] = f"{same} of {len(references)} the same, {undecided} more but for a tie"
    results[f"{name} tokens before a difference"] = tokens_before / len(references)


def _timed(results: Table, name: str, work: Callable[[], Any]) -> Any:
    started_s = time.process_time()
    value = work()
    results[f"{name}, CPU s"] = round(time.process_time() - started_s, 1)
    return value


if __name__ == "__main__":
    main()
