"""Prices to the last nano-unit: factors of classes, the curve of spot, what `max_price` refuses."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.request import Cost
from paceline.errors import ConfigError, InvalidRequest
from paceline.server.billing.charge import Charge, receipt
from paceline.server.billing.pricing import (
    LARGEST_AMOUNT,
    MILLION,
    Pricing,
    Quote,
    Rates,
    decimal_of,
    engine_load,
    read_factors,
    scaled,
    shown,
)
from paceline.server.errors import PriceAboveMaximum
from tests.pure.billing.billing_helpers import PRICES, record


def test_what_was_written_is_what_counts() -> None:
    assert scaled(decimal_of(0.1), 6) == 100_000 and scaled(decimal_of("0.000001"), 6) == 1
    with pytest.raises(ValueError, match="more than 6 decimals"):
        scaled(Decimal("0.0000001"), 6)
    assert [shown(value) for value in (0, 1, 1_500_000_000, -2_000_000_000)] == [
        "0",
        "0.000000001",
        "1.5",
        "-2",
    ]


@given(st.integers(0, 10**7), st.integers(0, 10**9), st.integers(0, 10**8), st.integers(0, 10**10))
def test_amounts_are_exact_fractions_rounded_down(tokens: int, rate: int, factor: int, block_us: int) -> None:
    rates = Rates(prompt=rate, cached_prompt=rate, output=rate, kv_block_second=rate)
    quote = Quote(service_class="standard", rates=rates, factor=factor)
    amounts = quote.amounts(computed=tokens, cached=0, output=tokens, block_us=block_us)
    exact = Fraction(tokens * rate, 10**12) * Fraction(factor, MILLION)
    assert amounts.prompt == amounts.output == min(LARGEST_AMOUNT, exact * 10**9 // 1)
    exact = Fraction(block_us, 10**6) * Fraction(rate, 10**9) * Fraction(factor, MILLION)
    assert amounts.kv == min(LARGEST_AMOUNT, exact * 10**9 // 1)
    assert amounts.total == amounts.prompt + amounts.output + amounts.kv


def test_a_receipt_says_everything_and_bills_nothing_twice() -> None:
    done = record()
    done.charge = Charge(Pricing().quote(PRICES, "batch", 0))
    told = receipt(done, done.charge)
    assert told == {
        "service_class": "batch",
        "prompt_tokens_computed": 60,
        "prompt_tokens_cached": 40,
        "recomputed_tokens": 12,
        "queue_ms": 250.0,
        "kv_block_seconds": 9.0,
        "recompute_kv_block_seconds": 1.0,
        "preemptions": {"recompute": 2, "swap": 1},
        "price": {
            "total_nano_units": 4500 + 1000 + 2100 + 8000,
            "prompt_nano_units": 4500,  # 60 * 150 nano-units, half of it
            "cached_prompt_nano_units": 1000,
            "output_nano_units": 2100,
            "kv_nano_units": 8000,  # 8 block-seconds, not 9
            "class_factor": 0.5,
        },
    }


def test_reused_tokens_are_told_apart_and_paid_as_prompt_tokens() -> None:
    """The context may have been computed on the way, which is not billed on its own."""
    plain, placed = record(cost=Cost()), record(cost=Cost(reused=32, recomputed=16))
    charge = Charge(Pricing().quote(PRICES, "batch", 0))
    told = receipt(placed, charge)
    assert told["prompt_tokens_computed"] == 28 and told["prompt_tokens_cached"] == 40
    assert (told["reused_tokens"], told["reused_tokens_recomputed"]) == (32, 16)
    assert told["price"] == receipt(plain, charge)["price"]
    assert "reused_tokens" not in receipt(plain, charge)


def test_spot_follows_the_load_between_its_floor_and_its_cap() -> None:
    curve = read_factors("spot=0.2:2")["spot"]
    at = [curve.at(int(load * MILLION)) for load in (0, 0.5, 0.75, 1, 3)]
    assert at == [200_000, 200_000, 1_100_000, 2_000_000, 2_000_000]
    quote = Pricing("spot=0.2:2").quote(PRICES, "spot", 750_000)
    assert quote.load == 750_000 and quote.output_price == 660_000
    assert Pricing().quote(PRICES, "standard", 750_000).load is None


def test_load_is_whatever_is_fuller() -> None:
    assert engine_load(2, 8, 0, 100) == 250_000
    assert engine_load(2, 8, 90, 100) == 900_000
    assert engine_load(20, 8, 0, 100) == MILLION
    assert engine_load(0, 0, 0, 0) == 0


def test_max_price_waits_for_spot_and_refuses_the_rest_for_good() -> None:
    pricing = Pricing("spot=0.25:1")
    busy, calm = (pricing.quote(PRICES, "spot", load) for load in (MILLION, 0))
    pricing.check(busy, None)
    pricing.check(busy, Decimal("0.6"))
    pricing.check(calm, Decimal("0.15"))
    with pytest.raises(PriceAboveMaximum, match="class spot cost 0.6 now") as refused:
        pricing.check(busy, Decimal("0.5999999"))
    assert refused.value.param == "max_price" and refused.value.code == "price_above_maximum"
    for quote, most in ((busy, "0.1499"), (pricing.quote(PRICES, "standard", 0), "0.5")):
        with pytest.raises(InvalidRequest, match="never less than") as never:
            pricing.check(quote, Decimal(most))
        assert never.value.param == "max_price"


@pytest.mark.parametrize(
    "text",
    [
        "gold=1",
        "spot",
        "spot=2:1",
        "batch=0.1:1",
        "standard=-1",
        "standard=x",
        "standard=0.0000001",
        "batch=1001",
    ],
)
def test_factors_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--price-factors"):
        read_factors(text)


def test_factors_that_are_not_given_keep_their_defaults() -> None:
    factors = read_factors("interactive=1.5")
    assert {name: (curve.floor, curve.cap) for name, curve in factors.items()} == {
        "interactive": (1_500_000, 1_500_000),
        "standard": (MILLION, MILLION),
        "spot": (250_000, MILLION),
        "batch": (500_000, 500_000),
        "host": (MILLION, MILLION),
        "disk": (MILLION, MILLION),
    }


def test_cached_tokens_have_a_price_by_where_they_were_loaded_from() -> None:
    """Of 40 cached tokens 16 came from host memory at half the price, and 8 from a disk for nothing."""
    used = record(cost=Cost(from_host=16, from_disk=8))
    plain = receipt(used, Charge(Pricing().quote(PRICES, "standard", 0)))
    quote = Pricing("host=0.5,disk=0").quote(PRICES, "standard", 0)
    found = receipt(used, Charge(quote))
    assert (found["prompt_tokens_cached_host"], found["prompt_tokens_cached_disk"]) == (16, 8)
    cached = found["price"]["cached_prompt_nano_units"]
    assert 40 * cached == (40 - 16 - 8 + 16 // 2) * plain["price"]["cached_prompt_nano_units"] > 0
    assert "prompt_tokens_cached_host" not in receipt(record(), Charge(quote))
