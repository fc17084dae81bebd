"""A GGUF model through the engine against transformers with the same numbers: greedy text and perplexity.

Text: prompts of English, continued greedily, in one batch here and one at a time there. Perplexity: a file cut into
windows, through `prompt_logprobs`; in float32, with torch's quantised product and with the native kernels. What
rounding costs: perplexity with keys and values as int8, and with the weights of layers rounded again, from the float32
numbers of the file; fp8 and int8 round inputs too, each token by its largest number. With --only noise, random numbers
are added to the weights instead, of a share of their squares (the same numbers for all matrices of a size), to tell
what an error of that size costs this model.

    python -m benchmarks.parity_smollm2 --text FILE [--model FILE.gguf] [--tokens 20000] [--prompts 50] [--only native]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Benchmark, Found, Given, flag
from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.files.stored import StoredTensor
from paceline.models.layers import DenseLinear, Linear
from paceline.models.load import DenseStorage, Storage, build_decoder
from paceline.models.quantized import QuantizedStorage, fast_product
from paceline.models.spec import ModelSpec
from paceline.runner.cpu import CPURunner, StepCompute
from paceline.runner.native.code import host_code
from paceline.runner.native.model import build_model, objection
from paceline.runner.native.step import NativeStep
from paceline.runner.torch_step import TorchStep
from paceline.text.tokenizer import Tokenizer
from tests.torch.english_prompts import PROMPTS
from tests.torch.gguf_reference import smollm2_path, transformers_model
from tests.torch.parity import TOLERANCE, Reference, greedy_reference

NUM_NEW = 24
WINDOW = 512
BLOCK_SIZE = 16
MakeStep = Callable[[EngineConfig], StepCompute]
bench = Benchmark(__doc__)


@bench.part(
    flag("--model", smollm2_path(), "a GGUF file (default: SmolLM2 where it is found)"),
    flag("--text", None, "file whose perplexity is measured", kind=Path, required=True),
    flag("--tokens", 20_000, "to predict"),
    flag("--prompts", len(PROMPTS), "to continue"),
    flag("--only", None, "of what is measured", choices=("parity", "rounded", "noise", "native")),
    flag("--roundings", None, "those of weights to measure, with commas; none: all, and KV", kind=str),
    flag("--threads", 1),
)
def parity(given: Given) -> Found:
    if given.model is None:
        raise SystemExit("SmolLM2 is not on this machine: name a GGUF file with --model")
    torch.set_num_threads(given.threads)
    checkpoint = open_checkpoint(given.model)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    windows = _windows(tokenizer, given)
    prompts = [tokenizer.encode(text) for text in PROMPTS[: given.prompts]]
    results: Found = {"model": Path(given.model).name, "tokens": sum(len(window) - 1 for window in windows)}
    if given.only == "native":
        losses = [
            _note_loss(results, name, make_step, checkpoint.spec, windows)
            for name, make_step in _backends(checkpoint, given)
            if name != "quantised"
        ]
        results["native perplexity off by %"] = 100 * (math.exp(losses[1] - losses[0]) - 1)
    if given.only in (None, "parity"):
        references, their_loss = _of_transformers(checkpoint, prompts, windows, results)
        for name, make_step in _backends(checkpoint, given):
            outputs = _timed(results, f"{name} text", partial(generate, make_step, checkpoint.spec, prompts))
            _note_text(results, name, references, outputs)
            loss = _note_loss(results, name, make_step, checkpoint.spec, windows)
            results[f"{name} perplexity off by %"] = 100 * (math.exp(loss - their_loss) - 1)
    if given.only in (None, "rounded"):
        _note_rounded(results, checkpoint, given, windows)
    if given.only == "noise":
        _note_noise(results, checkpoint, windows)
    for key, value in results.items():
        print(f"{key:32} {value:.5g}" if isinstance(value, float) else f"{key:32} {value}")
    return results


def _backends(checkpoint: Checkpoint, given: Given) -> Iterator[tuple[str, MakeStep]]:
    """What can compute the model here; each is loaded when it is asked for, and let go of behind it."""

    def on_torch(storage: Storage | None) -> MakeStep:
        decoder = build_decoder(checkpoint, WINDOW + 2, storage)
        return lambda config: TorchStep(decoder, config.kv)

    yield "float32", on_torch(None)
    product = fast_product()
    if product is not None:
        yield "quantised", on_torch(QuantizedStorage(product))
    if not objection(checkpoint, BLOCK_SIZE):
        model = build_model(checkpoint, WINDOW + 2)
        code = host_code(print)
        yield "native", lambda config: NativeStep(model, config, code, given.threads)


def _note_rounded(results: Found, checkpoint: Checkpoint, given: Given, windows: Sequence[list[int]]) -> None:
    """Perplexity of rounded numbers against the same step without the rounding."""
    spec = checkpoint.spec
    decoder = build_decoder(checkpoint, WINDOW + 2)
    exact = _note_loss(
        results, "float32 weights", lambda config: TorchStep(decoder, config.kv), spec, windows
    )

    def note(name: str, make_step: MakeStep, base: float) -> None:
        loss = _note_loss(results, name, make_step, spec, windows)
        results[f"{name} perplexity up by %"] = 100 * (math.exp(loss - base) - 1)

    for name in ROUNDINGS if given.roundings is None else given.roundings.split(","):
        rounded = build_decoder(checkpoint, WINDOW + 2, RoundedStorage(ROUNDINGS[name]))
        note(name, partial(lambda decoder, config: TorchStep(decoder, config.kv), rounded), exact)
    if given.roundings is not None:
        return
    note("int8 KV, torch", lambda config: TorchStep(decoder, config.kv, kv_dtype="int8"), exact)
    if not objection(checkpoint, BLOCK_SIZE, kv_dtype="int8"):
        model, code = build_model(checkpoint, WINDOW + 2), host_code(print)

        def native(config: EngineConfig, kv_dtype: str) -> NativeStep:
            return NativeStep(model, config, code, given.threads, kv_dtype=kv_dtype)

        base = _note_loss(results, "native", partial(native, kv_dtype="float32"), spec, windows)
        note("int8 KV, native", partial(native, kv_dtype="int8"), base)


def _note_noise(results: Found, checkpoint: Checkpoint, windows: Sequence[list[int]]) -> None:
    """The error of each rounding of weights, and what random numbers of given errors cost."""
    exact = 0.0
    for percent in (0.0, *NOISES):
        storage = RoundedStorage((_noise(percent / 100), None))
        decoder = build_decoder(checkpoint, WINDOW + 2, storage)
        make_step = partial(lambda decoder, config: TorchStep(decoder, config.kv), decoder)
        loss = _note_loss(results, f"noise of {percent} %", make_step, checkpoint.spec, windows)
        exact = loss if not percent else exact
        results[f"noise of {percent} % perplexity up by %"] = 100 * (math.exp(loss - exact) - 1)
    matrices = [name for name in checkpoint.names() if name.endswith("_proj.weight")]
    for name, (rounding, _) in ROUNDINGS.items():
        error = square = 0.0
        for matrix in matrices[::7]:
            weight = torch.from_numpy(checkpoint.tensor(matrix).to_float32())
            error += float((rounding(weight) - weight).square().sum())
            square += float(weight.square().sum())
        results[f"{name}, error of weights, %"] = 100 * error / square


def _note_loss(
    results: Found, name: str, make_step: MakeStep, spec: ModelSpec, windows: Sequence[list[int]]
) -> float:
    loss: float = _timed(results, f"{name} perplexity", partial(mean_loss, make_step, spec, windows))
    results[f"{name} perplexity"] = math.exp(loss)
    print(f"{name}: perplexity {math.exp(loss):.4f}", flush=True)
    return loss


Rounding = Callable[[Tensor], Tensor]


def _eight_bits(dtype: torch.dtype) -> Rounding:
    """The largest number of each row becomes the largest there is."""
    most = 127.0 if dtype == torch.int8 else 448.0

    def rounded(values: Tensor) -> Tensor:
        scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-20) / most
        steps = values / scale
        return (steps.round() if dtype == torch.int8 else steps).to(dtype).float() * scale

    return rounded


def _four_bits(group: int) -> Rounding:
    """Sixteen steps for each group of inputs, over its range less up to a tenth at each end, as comes closest."""

    def rounded(values: Tensor) -> Tensor:
        return torch.cat([_closest(part) for part in torch.split(values, group, dim=1)], dim=1)

    return rounded


def _closest(values: Tensor) -> Tensor:
    whole = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    reach = whole[1] - whole[0]

    def covering(low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        scale = ((high - low) / 15).clamp_min(1e-10)
        found = ((values - low) / scale).round().clamp(0, 15) * scale + low
        return (found - values).square().sum(dim=1, keepdim=True), found, low, high

    best = covering(*whole)
    for is_high in (True, False):
        low, high = best[2:]
        for cut in (0.025, 0.05, 0.075, 0.1):
            tried = (
                covering(low, whole[1] - cut * reach) if is_high else covering(whole[0] + cut * reach, high)
            )
            best = tuple(
                torch.where(tried[0] < best[0], new, old) for new, old in zip(tried, best, strict=True)
            )
    return best[1]


NOISES = (0.03, 0.07, 0.25, 0.6, 1.0)


def _noise(share: float) -> Rounding:
    """Normal numbers, with this share of the squares of the row they are added to."""

    def moved(values: Tensor) -> Tensor:
        draws = torch.Generator().manual_seed(values.numel())
        size = values.square().mean(dim=1, keepdim=True).sqrt() * math.sqrt(share)
        return values + torch.randn(values.shape, generator=draws) * size

    return moved


# By what `--quantization` and files make: how weights are rounded, and whether inputs are.
ROUNDINGS: dict[str, tuple[Rounding, Rounding | None]] = {
    "fp8": (_eight_bits(torch.float8_e4m3fn), _eight_bits(torch.float8_e4m3fn)),
    "fp8 with inputs of 16 bits": (_eight_bits(torch.float8_e4m3fn), None),
    "int8": (_eight_bits(torch.int8), _eight_bits(torch.int8)),
    "int4 in 128s": (_four_bits(128), None),
    "int4 in 32s": (_four_bits(32), None),
}


class RoundedLinear(DenseLinear):
    """A product with rounded inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, inputs: Rounding) -> None:
        super().__init__(weight, bias)
        self._inputs = inputs

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(self._inputs(x))


class RoundedStorage(DenseStorage):
    """The matrices of layers rounded; embedding and output matrix as they are."""

    def __init__(self, rounding: tuple[Rounding, Rounding | None]) -> None:
        super().__init__()
        self._weights, self._inputs = rounding

    def linear(self, weights: Sequence[StoredTensor], bias: Tensor | None) -> Linear:
        made = super().linear(weights, bias)
        assert isinstance(made, DenseLinear)
        if weights[0].name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return made
        rounded = self._weights(made.weight)
        return (
            DenseLinear(rounded, bias) if self._inputs is None else RoundedLinear(rounded, bias, self._inputs)
        )


def _windows(tokenizer: Tokenizer, given: Given) -> list[list[int]]:
    """The text cut into pieces in which `--tokens` tokens are predicted; each begins as the model expects it."""
    ids = tokenizer.encode(given.text.read_text()[: 8 * given.tokens], add_special_tokens=False)
    first = tokenizer.encode("")  # what every text begins with
    size = WINDOW - len(first)
    predicted = size if first else size - 1
    count = -(-given.tokens // predicted)
    windows = [first + ids[index * size : (index + 1) * size] for index in range(count)]
    assert len(windows[-1]) > 1, "the text is too short for --tokens"
    return windows


def _of_transformers(
    checkpoint: Checkpoint, prompts: Sequence[list[int]], windows: Sequence[list[int]], results: Found
) -> tuple[list[Reference], float]:
    model = transformers_model(checkpoint)
    read = partial(greedy_reference, model, num_new=NUM_NEW, eos=checkpoint.spec.eos_token_ids)
    references = _timed(results, "transformers text", lambda: [read(prompt) for prompt in prompts])
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


def generate(make_step: MakeStep, spec: ModelSpec, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Greedy continuations, all prompts in one engine at once."""
    engine = _engine(make_step, spec, budget=256)
    sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
    found: dict[int, list[int]] = {engine.add(prompt, sampling)[0]: [] for prompt in prompts}
    while engine.has_requests:
        for batch in engine.step_overlapped().tokens:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[request].append(token)
    return [tuple(tokens) for tokens in found.values()]


def mean_loss(make_step: MakeStep, spec: ModelSpec, windows: Sequence[list[int]]) -> float:
    """Mean negative log-likelihood of the windows' tokens, through `prompt_logprobs`."""
    engine = _engine(make_step, spec, budget=WINDOW)
    total, count = 0.0, 0
    for window in windows:
        engine.add(window, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        while engine.has_requests:
            for event in engine.step().logprobs:
                total -= event.logprobs.logprob
                count += 1
    assert count == sum(len(window) - 1 for window in windows)
    return total / count


def _engine(make_step: MakeStep, spec: ModelSpec, budget: int) -> Engine:
    groups = tuple(GroupSpec(window=window) for window in spec.group_windows)
    config = EngineConfig(
        kv=KVConfig(block_size=BLOCK_SIZE, num_blocks=1000, groups=groups),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=budget, max_model_len=WINDOW + 1),
    )
    return build_engine(config, CPURunner(config, make_step(config)))


def _note_text(
    results: Found, name: str, references: Sequence[Reference], outputs: Sequence[tuple[int, ...]]
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


def _timed(results: Found, name: str, work: Callable[[], Any]) -> Any:
    started_s = time.process_time()
    value = work()
    results[f"{name}, CPU s"] = round(time.process_time() - started_s, 1)
    return value


if __name__ == "__main__":
    bench.main()
