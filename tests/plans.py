"""Plans with anything in any field, and what makes two of them equal.

Fields are read from `StepPlan`, so that a new one is drawn too.
"""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from paceline.core.parameters import KVKeep, Pin, PoolingParams
from paceline.core.plan import F32, I32, I64, EncodeJoin, StepPlan, i32
from paceline.core.request import BlockKey
from paceline.core.sampling import RequestOutputKind, SamplingParams
from paceline.core.structure import Structure

LARGEST = {I32: 2**31 - 1, I64: 2**63 - 1}
# Each parameter with a value that it does not have by default.
SAMPLED: dict[str, Any] = {
    "max_tokens": 900,
    "min_tokens": 3,
    "n": 2,
    "temperature": 0.1 + 0.2,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {5: -100.0, 77: 1.5},
    "allowed_token_ids": (4, 5, 6),
    "bad_words": ("wort", (1, 2, 3)),
    "prediction": (9, 8, 7),
    "seed": -(2**63),
    "stop": ("ende", "\n\n"),
    "stop_token_ids": (2, 0),
    "ignore_eos": True,
    "logprobs": 3,
    "prompt_logprobs": 0,
    "structured_outputs": Structure(kind="regex", source="[ä-ü]+", after="</think>", within=10),
    "kv_keep": KVKeep(first=4, recent=100),
    "pooling": PoolingParams(kind="choice", token_ids=(3, 4), raw=True, second_at=7),
    "pin": Pin(ttl_s=60, name="werk", num_tokens=12),
    "cache_share": 0.5,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "output_kind": RequestOutputKind.DELTA,
    "deadline_ms": 100,
    "ttft_slo_ms": 50,
    "itl_slo_ms": 20,
    "on_infeasible": "try",
    "on_stop": "hold",
    "hold_s": 1.5,
}
_SAMPLING = [SamplingParams(), *(SamplingParams(**{name: value}) for name, value in SAMPLED.items())]


def random_plan(rng: random.Random) -> StepPlan:
    """A plan of the right types; what it says makes no sense."""
    hints = get_type_hints(StepPlan)
    values = {
        name: _value(rng, name, hint) for name, hint in hints.items() if name != "seq" and rng.random() < 0.4
    }
    return StepPlan(seq=rng.choice((1, 77, 2**40)), **values)


def _value(rng: random.Random, name: str, hint: Any) -> Any:
    if hint in (I32, I64):
        most = LARGEST[hint]
        return np.array(
            [rng.randint(-most, most) for _ in range(rng.randrange(4))],
            np.dtype(get_args(get_args(hint)[1])[0]),
        )
    if hint == F32:
        return np.array([rng.random() for _ in range(rng.randrange(4))], np.float32)
    if hint is bool:
        return rng.random() < 0.5
    if hint is int:
        return rng.choice((0, 1, rng.randrange(2**60)))
    if hint is float:
        return rng.choice((0.0, rng.random()))
    if is_dataclass(hint):
        inner = get_type_hints(hint)
        kind: Any = hint
        return kind(**{name: _value(rng, name, each) for name, each in inner.items() if rng.random() < 0.8})
    assert get_origin(hint) is tuple, f"{name}: {hint}"
    return tuple(_entry(rng, get_args(hint)[0]) for _ in range(rng.randrange(4)))


def _entry(rng: random.Random, hint: Any) -> Any:
    """Of a tuple."""
    if hint is SamplingParams:
        return rng.choice(_SAMPLING)
    if hint is BlockKey:
        return BlockKey(*(rng.randbytes(rng.choice((0, 8))) for _ in fields(BlockKey)))
    if hint is EncodeJoin:
        pages = tuple(rng.randrange(1000) for _ in range(rng.randrange(3)))
        return EncodeJoin(rng.randrange(99), rng.randrange(99), rng.randrange(99), pages)
    if hint is int:
        return rng.randrange(-5, 2**40)
    if hint == I32:
        return i32(rng.randrange(2**31) for _ in range(rng.randrange(5)))
    return tuple((rng.randrange(99), rng.randrange(99), rng.randrange(99)) for _ in range(rng.randrange(3)))


def same(one: Any, other: Any) -> bool:
    """Whether two plans, or parts of them, say the same; an empty part is as good as none."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one) and type(one).__eq__ is object.__eq__:
        return type(one) is type(other) and all(
            same(getattr(one, spec.name), getattr(other, spec.name)) for spec in fields(one)
        )
    return bool(one == other) and type(one) is type(other)
