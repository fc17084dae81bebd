"""The answer of /v1/estimate: whether a request would be taken, when it would be served, and at what price.

Owns the shape of the answer; prices are those of `billing`. Runs nothing, reserves nothing and charges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.events import Forecast
from paceline.errors import PacelineError
from paceline.server.billing.charge import amount_values, factor_values
from paceline.server.billing.pricing import Quote
from paceline.server.errors import problem_of


def forecast_headers(forecast: Forecast | None) -> dict[str, str]:
    """When an answer is expected, in its headers."""
    if forecast is None:
        return {}
    return {
        "x-paceline-queue-position": str(forecast.ahead),
        "x-paceline-predicted-ttft-ms": str(milliseconds(forecast.first_token_s)),
        "x-paceline-predicted-finish-ms": str(milliseconds(forecast.finish_s)),
    }


def milliseconds(seconds: float) -> int:
    return max(0, round(1e3 * seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What would become of a request. `refusal`: what it would be refused with; None when it would be taken."""

    num_prompt: int
    max_tokens: int  # of all answers together
    num_answers: int
    num_image: int = 0  # tokens of the prompt that stand for pictures
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
    problem = None if estimate.refusal is None else problem_of(estimate.refusal)
    return {
        "object": "estimate",
        "model": model,
        "fits": problem is None,
        "reason": problem and problem.message,
        "code": problem and problem.code,
        "param": problem and problem.param,
        "retry_after_s": problem and problem.retry_after_s,
        "prompt_tokens": estimate.num_prompt,
        "cached_tokens": estimate.num_cached,
        "max_tokens": estimate.max_tokens,
        "expected_tokens": estimate.num_expected,
        "queue_position": forecast and forecast.ahead,
        "ttft_ms": forecast and milliseconds(forecast.first_token_s),
        "finish_ms": forecast and milliseconds(forecast.finish_s),
        **({"image_tokens": estimate.num_image} if estimate.num_image else {}),
        **(
            {"pinned_kv_block_seconds": forecast.pinned_block_us / 1e6}
            if forecast and forecast.pinned_block_us
            else {}
        ),
        "service_class": estimate.quote.service_class,
        "price": price_body(estimate.quote, estimate),
    }


def price_body(quote: Quote, estimate: Estimate) -> dict[str, Any]:
    """`expected`: by the lengths answers have had; `at_most`: found in no cache after all, and every token made. How
    long blocks are held has no bound that could be named, so that `at_most` leaves them out, but for those that are
    pinned."""
    forecast, num_output, expected = estimate.forecast, estimate.num_expected, None
    if forecast is not None and num_output is not None:
        # Held from the first token to the last, the blocks being half full of output on average.
        num_blocks = (estimate.num_prompt + num_output / 2) / estimate.block_size
        held_s = max(0.0, forecast.finish_s - forecast.first_token_s)
        amounts = quote.amounts(
            computed=estimate.num_prompt - estimate.num_cached,
            cached=estimate.num_cached,
            output=num_output,
            block_us=round(1e6 * num_blocks * held_s) + forecast.pinned_block_us,
        )
        expected = amount_values(amounts)
    pinned_us = 0 if forecast is None else forecast.most_pinned_block_us
    prompts = ({"computed": estimate.num_prompt, "cached": 0}, {"computed": 0, "cached": estimate.num_prompt})
    dearest = max(
        (quote.amounts(**prompt, output=estimate.max_tokens, block_us=pinned_us) for prompt in prompts),
        key=lambda amounts: amounts.total,
    )
    return {"expected": expected, "at_most": amount_values(dearest), **factor_values(quote)}
