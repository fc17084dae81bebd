"""The answer of /v1/estimate: whether a request would be taken, when it would be served, and at what price.

Owns the shape of the answer and the arithmetic of its prices. Runs nothing, reserves nothing and charges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.server.call import Caller
from paceline.server.errors import problem_of
from paceline.server.prospects import milliseconds
from paceline.server.tenant import Prices
from paceline.serving.client import Prospect

PER = 1e6  # tokens that a price is for


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What would become of a request. `refusal`: what it would be refused with; None when it would be taken."""

    num_prompt: int
    max_tokens: int  # of all answers together
    num_answers: int
    block_size: int
    prospect: Prospect | None
    refusal: PacelineError | None

    @property
    def num_cached(self) -> int:
        return 0 if self.prospect is None else self.prospect.num_cached

    @property
    def num_expected(self) -> int | None:
        """Tokens of the answers, as answers of this tenant have turned out; None: nobody knows yet."""
        if self.prospect is None or self.prospect.num_output is None:
            return None
        return min(self.max_tokens, round(self.num_answers * self.prospect.num_output))


def class_factor(caller: Caller) -> float:
    """How many times the key's prices a request of its class pays at the moment.

    All classes pay the same as long as nothing makes a price follow the load.
    """
    return 1.0


def estimate_body(model: str, estimate: Estimate, caller: Caller) -> dict[str, Any]:
    prospect = estimate.prospect
    first_s = None if prospect is None else prospect.first_token_s
    finish_s = None if prospect is None else prospect.finish_s
    problem = None if estimate.refusal is None else problem_of(estimate.refusal)
    return {
        "object": "estimate",
        "model": model,
        "fits": problem is None,
        "reason": None if problem is None else problem.message,
        "code": None if problem is None else problem.code,
        "param": None if problem is None else problem.param,
        "retry_after_s": None if problem is None else problem.retry_after_s,
        "prompt_tokens": estimate.num_prompt,
        "cached_tokens": estimate.num_cached,
        "max_tokens": estimate.max_tokens,
        "expected_tokens": estimate.num_expected,
        "queue_position": None if first_s is None or prospect is None else prospect.ahead,
        "ttft_ms": None if first_s is None else milliseconds(first_s),
        "finish_ms": None if finish_s is None else milliseconds(finish_s),
        "service_class": caller.service_class,
        "price": price_body(caller.prices, estimate, class_factor(caller)),
    }


def price_body(prices: Prices, estimate: Estimate, factor: float) -> dict[str, float | None]:
    """In the unit of the keys file. `expected`: by the lengths answers have had; `at_most`: by what was asked for."""
    computed = estimate.num_prompt - estimate.num_cached
    prompt = factor * prices.prompt * computed / PER
    cached = factor * prices.cached_prompt * estimate.num_cached / PER
    output = factor * prices.output / PER
    expected = estimate.num_expected
    memory = (
        None if expected is None else factor * prices.kv_block_second * _block_seconds(estimate, expected)
    )
    return {
        "prompt": prompt,
        "cached_prompt": cached,
        "output_expected": None if expected is None else output * expected,
        "output_at_most": output * estimate.max_tokens,
        "kv_expected": memory,
        "expected": None
        if expected is None or memory is None
        else prompt + cached + output * expected + memory,
        # Found in no cache after all, and every token made. How long blocks are held has no bound that could be named.
        "at_most": factor * max(prices.prompt, prices.cached_prompt) * estimate.num_prompt / PER
        + output * estimate.max_tokens,
    }


def _block_seconds(estimate: Estimate, expected: int) -> float:
    """Blocks times seconds from the first token to the last, the blocks being half full of output on average."""
    prospect = estimate.prospect
    if prospect is None or prospect.first_token_s is None or prospect.finish_s is None:
        return 0.0
    held = (estimate.num_prompt + expected / 2) / estimate.block_size
    return held * max(0.0, prospect.finish_s - prospect.first_token_s)
