"""The answer of /v1/estimate: whether a request would be taken, when it would be served, and at what price.

Owns the shape of the answer; prices are those of `billing`. Runs nothing, reserves nothing and charges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.events import Forecast
from paceline.errors import PacelineError
from paceline.server.billing.charge import amount_values, factor_values
from paceline.server.billing.pricing import Quote
from paceline.server.errors import problem_of

# When an answer is expected, in its headers.


class ForecastHeaders(Mapping[str, str]):
    """Other headers, and those of a forecast as soon as there is one: they are read when the status goes out."""

    def __init__(self, others: Mapping[str, str], forecast: Callable[[], Forecast | None]) -> None:
        self._others = others
        self._forecast = forecast

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, str]:
        found = self._forecast()
        headers = dict(self._others)
        if found is not None:
            headers["x-paceline-queue-position"] = str(found.ahead)
            headers["x-paceline-predicted-ttft-ms"] = str(milliseconds(found.first_token_s))
            headers["x-paceline-predicted-finish-ms"] = str(milliseconds(found.finish_s))
        return headers


def milliseconds(seconds: float) -> int:
    return max(0, round(1e3 * seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What would become of a request. `refusal`: what it would be refused with; None when it would be taken."""

    num_prompt: int
    max_tokens: int  # of all answers together
    num_answers: int
    block_size: int
    quote: Quote
    forecast: Forecast | None
    refusal: PacelineError | None

    @property
    def num_cached(self) -> int:
        return 0 if self.forecast is None else self.forecast.num_cached

    @property
    def num_expected(self) -> int | None:
        """Tokens of the answers, as answers of this tenant have turned out; None: not known yet."""
        if self.forecast is None:
            return None
        return min(self.max_tokens, round(self.num_answers * self.forecast.num_output))


def estimate_body(model: str, estimate: Estimate) -> dict[str, Any]:
    forecast = estimate.forecast
    first_s = None if forecast is None else forecast.first_token_s
    finish_s = None if forecast is None else forecast.finish_s
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
        "queue_position": None if forecast is None else forecast.ahead,
        "ttft_ms": None if first_s is None else milliseconds(first_s),
        "finish_ms": None if finish_s is None else milliseconds(finish_s),
        "service_class": estimate.quote.service_class,
        "price": price_body(estimate.quote, estimate),
    }


def price_body(quote: Quote, estimate: Estimate) -> dict[str, Any]:
    """`expected`: by the lengths answers have had; `at_most`: found in no cache after all, and every token made. How
    long blocks are held has no bound that could be named, so that `at_most` leaves them out."""
    num_output, expected = estimate.num_expected, None
    if num_output is not None:
        expected = amount_values(
            quote.amounts(
                computed=estimate.num_prompt - estimate.num_cached,
                cached=estimate.num_cached,
                output=num_output,
                block_us=_block_us(estimate, num_output),
            )
        )
    prompts = ({"computed": estimate.num_prompt, "cached": 0}, {"computed": 0, "cached": estimate.num_prompt})
    dearest = max(
        (quote.amounts(**prompt, output=estimate.max_tokens, block_us=0) for prompt in prompts),
        key=lambda amounts: amounts.total,
    )
    return {"expected": expected, "at_most": amount_values(dearest), **factor_values(quote)}


def _block_us(estimate: Estimate, expected: int) -> int:
    """Blocks times microseconds from the first token to the last, the blocks being half full of output on average."""
    forecast = estimate.forecast
    if forecast is None:
        return 0
    held = (estimate.num_prompt + expected / 2) / estimate.block_size
    return round(1e6 * held * max(0.0, forecast.finish_s - forecast.first_token_s))
