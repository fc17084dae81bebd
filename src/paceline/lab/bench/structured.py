"""What a form of the answer costs: answers by a schema, and free text of exactly the same length, in turns.

Both run in one engine, all requests at once. Every answer that was not cut off has to parse. Prints nothing.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.core.structure import Structure
from paceline.errors import EngineFailed, InputError
from paceline.llm.llm import LLM
from paceline.llm.outputs import RequestOutput

_WORD = {"type": "string", "pattern": "^[A-Za-z ]{2,20}$"}
_DATE = {"type": "string", "format": "date"}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# By name, what people have made of text: a record, a verdict, a list, a call.
SCHEMAS: Mapping[str, Any] = {
    "person": _object(
        first_name=_WORD,
        last_name=_WORD,
        age={"type": "integer", "minimum": 1, "maximum": 99},
        country={"enum": ["Germany", "India", "Brazil", "Kenya", "Canada"]},
    ),
    "review": _object(
        sentiment={"enum": ["positive", "neutral", "negative"]},
        score={"type": "integer", "minimum": 1, "maximum": 5},
        is_spam={"type": "boolean"},
        summary={"type": "string", "maxLength": 40},
    ),
    "order": _object(
        order_date=_DATE,
        items={
            "type": "array",
            "items": _object(product_name=_WORD, quantity={"type": "integer", "minimum": 1, "maximum": 20}),
            "minItems": 2,
            "maxItems": 2,
        },
    ),
    "call": _object(
        name={"const": "get_weather"},
        arguments=_object(city=_WORD, unit={"enum": ["celsius", "fahrenheit"]}, forecast_date=_DATE),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredResult:
    """What one schema took, and free text of the same length."""

    workload: str  # the schema
    num_requests: int
    output_tokens: int
    cut_off: int  # answers that reached the most tokens
    free_s: float  # medians over the rounds
    structured_s: float
    ratio: float  # of throughputs, structured over free; the median over pairs
    tokens_per_step: float  # tokens a row gets in a step, structured
    free_tokens_per_step: float

    @property
    def free_tokens_per_s(self) -> float:
        return self.output_tokens / self.free_s

    @property
    def structured_tokens_per_s(self) -> float:
        return self.output_tokens / self.structured_s


def read_schema(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--schema {path}: {error}") from error


def structure_of(schema: Any, *, compact: bool) -> Structure:
    return Structure.of({"json": schema, "disable_any_whitespace": compact})


def run_structured(
    llm: LLM, name: str, structure: Structure, sampling: SamplingParams, *, clients: int, rounds: int
) -> StructuredResult:
    """Measure one schema with this number of requests at a time."""
    prompts = [f"Text {index + 1}, a {name}, as JSON: " for index in range(clients)]
    ruled = [_seeded(replace(sampling, structured_outputs=structure), index) for index in range(clients)]
    outputs = _timed(llm, prompts, ruled)[1]  # compiles the schema, and tells the lengths
    cut_off = _check(name, outputs)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    # As in other measurements, tokens are not made text: a server does that in another process.
    ruled = [replace(each, detokenize=False) for each in ruled]
    free = [
        _seeded(replace(sampling, max_tokens=count, ignore_eos=True, detokenize=False), index)
        for index, count in enumerate(counts)
    ]
    seconds: dict[str, list[float]] = {"free": [], "structured": []}
    rows = {"free": 0, "structured": 0}
    counters = llm.loaded.engine.scheduler.state.counters
    for _ in range(rounds):
        for kind, chosen in (("free", free), ("structured", ruled)):
            before = counters.logit_rows
            seconds[kind].append(_timed(llm, prompts, chosen)[0])
            rows[kind] += counters.logit_rows - before
    pairs = zip(seconds["free"], seconds["structured"], strict=True)
    return StructuredResult(
        workload=name,
        num_requests=clients,
        output_tokens=sum(counts),
        cut_off=cut_off,
        free_s=statistics.median(seconds["free"]),
        structured_s=statistics.median(seconds["structured"]),
        ratio=statistics.median(free_s / structured_s for free_s, structured_s in pairs),
        tokens_per_step=rounds * sum(counts) / rows["structured"],
        free_tokens_per_step=rounds * sum(counts) / rows["free"],
    )


def total_of(results: Sequence[StructuredResult]) -> StructuredResult:
    """All schemas, one after the other."""
    tokens = sum(result.output_tokens for result in results)
    free_s = sum(result.free_s for result in results)
    structured_s = sum(result.structured_s for result in results)
    return StructuredResult(
        workload="all",
        num_requests=sum(result.num_requests for result in results),
        output_tokens=tokens,
        cut_off=sum(result.cut_off for result in results),
        free_s=free_s,
        structured_s=structured_s,
        ratio=free_s / structured_s,
        tokens_per_step=tokens / sum(result.output_tokens / result.tokens_per_step for result in results),
        free_tokens_per_step=tokens
        / sum(result.output_tokens / result.free_tokens_per_step for result in results),
    )


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    return replace(sampling, seed=index) if sampling.temperature > 0 else sampling


def _timed(
    llm: LLM, prompts: Sequence[str], sampling: Sequence[SamplingParams]
) -> tuple[float, list[RequestOutput]]:
    llm.reset_prefix_cache()
    gc.collect()
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started_s, outputs


def _check(name: str, outputs: Sequence[RequestOutput]) -> int:
    """How many answers were cut off; all others parse, or the figures mean nothing."""
    cut_off = 0
    for index, output in enumerate(outputs):
        part = output.outputs[0]
        if part.finish_reason == "length":
            cut_off += 1
            continue
        try:
            json.loads(part.text)
        except ValueError:
            message = f"{name}: answer {index} is not JSON: {part.error or part.text[:200]!r}"
            raise EngineFailed(message) from None
    return cut_off
