"""Limits by the minute, on a clock that a test moves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.server.access.caller import Caller
from paceline.server.access.rate_limits import Allowance, RateLimits, duration
from paceline.server.errors import RateLimited, problem_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """One key and its limits."""

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self.clock = Clock()
        self.rates = RateLimits(self.clock)
        self.caller = Caller(tenant="a", requests_per_minute=requests, tokens_per_minute=tokens)

    def open(self) -> Allowance:
        found = self.rates.open(self.caller)
        assert found is not None
        return found

    def request(self) -> Allowance:
        found = self.open()
        found.count_request()
        return found

    def charge(self, num_prompt: int, num_answer: int) -> Allowance:
        found = self.open()
        found.charge_tokens(num_prompt, num_answer)
        return found

    def wait_for(self, amount: int = 1) -> int:
        """Retry-After of a request, or of `amount` tokens; 0 when it passes."""
        try:
            if self.caller.tokens_per_minute is not None:
                self.charge(amount, 0)
            else:
                self.request()
        except RateLimited as error:
            return int(error.retry_after_s or 0)
        return 0


def test_a_key_without_limits_is_not_counted() -> None:
    rates = RateLimits(Clock())
    assert rates.open(Caller(tenant="a", max_concurrency=3)) is None and len(rates) == 0


def test_a_minutes_worth_may_come_at_once_and_then_one_by_one() -> None:
    world = World(requests=60)
    for _ in range(60):
        world.request()
    assert world.wait_for() == 1
    world.clock.now_s += 0.9
    assert world.wait_for() == 1
    world.clock.now_s += 0.1
    assert world.wait_for() == 0
    assert world.wait_for() == 1
    world.clock.now_s += 3600
    for _ in range(60):
        world.request()
    assert world.wait_for() == 1


@pytest.mark.parametrize("per_minute, wait_s", [(1, 60), (7, 9), (60, 1), (6000, 1)])
def test_a_request_that_waits_as_long_as_retry_after_says_passes(per_minute: int, wait_s: int) -> None:
    world = World(requests=per_minute)
    for _ in range(per_minute):
        world.request()
    assert world.wait_for() == wait_s
    world.clock.now_s += wait_s
    assert world.wait_for() == 0


def test_a_refused_request_costs_nothing_and_names_its_limit() -> None:
    world = World(requests=1)
    world.request()
    for _ in range(5):
        with pytest.raises(RateLimited, match="requests_per_minute") as refused:
            world.request()
    found = problem_of(refused.value)
    assert (found.status, found.code, found.retry_after_s) == (429, "rate_limit_exceeded", 60)
    assert "try again in 60 s" in found.message and refused.value.limit == "requests_per_minute"


def test_a_request_that_is_taken_back_does_not_count() -> None:
    world = World(requests=1)
    first = world.request()
    first.take_back()
    first.take_back()
    world.request()
    assert world.wait_for() == 60


def test_tokens_are_charged_in_full_and_corrected_at_the_end() -> None:
    world = World(tokens=6000)
    first = world.charge(1000, 3000)
    assert world.open().headers()["x-ratelimit-remaining-tokens"] == "2000"
    assert world.wait_for(2500) == 5, "500 tokens too many, 100 a second"
    first.settle_tokens(1200)
    first.settle_tokens(0)
    assert world.open().headers()["x-ratelimit-remaining-tokens"] == "4800"
    assert world.wait_for(4800) == 0


def test_an_answer_longer_than_a_minutes_worth_needs_an_empty_bucket_and_is_paid_off() -> None:
    world = World(tokens=600)
    world.charge(100, 0).settle_tokens(100)
    with pytest.raises(RateLimited, match="tokens_per_minute"):
        world.charge(10, 100_000)
    world.clock.now_s += 10
    long = world.charge(10, 100_000)
    long.settle_tokens(1210)
    assert world.open().headers()["x-ratelimit-remaining-tokens"] == "0"
    assert world.wait_for(10) == 62, "610 over, and ten more, at ten a second"


def test_a_prompt_that_never_fits_is_not_told_to_try_again() -> None:
    world = World(tokens=600)
    with pytest.raises(InvalidRequest, match="tokens_per_minute") as refused:
        world.charge(601, 1)
    assert problem_of(refused.value).status == 400
    assert world.charge(600, 1) is not None


def test_a_look_ahead_charges_nothing() -> None:
    world = World(tokens=600)
    for _ in range(9):
        world.open().check_tokens(10**9, 10**9)
    world.charge(400, 0)
    with pytest.raises(RateLimited) as refused:
        world.open().check_tokens(201, 250)
    assert refused.value.retry_after_s == 5, "for 250, at ten a second"
    world.open().check_tokens(200, 600)


def test_headers_say_what_is_left() -> None:
    world = World(requests=60, tokens=600)
    allowance = world.request()
    allowance.charge_tokens(50, 25)
    assert allowance.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "525",
        "x-ratelimit-reset-tokens": "7.5s",
    }
    assert set(World(requests=5).open().headers()) == {
        f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")
    }


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (61.25, "1m1.25s"),
    ],
)
def test_times_are_written_as_clients_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------- keys that are read again


def test_what_was_spent_stays_spent_under_another_limit() -> None:
    world = World(requests=60)
    for _ in range(30):
        world.request()
    world.rates.keep_only(["a", "b"])
    world.caller = Caller(tenant="a", requests_per_minute=40)
    assert world.open().headers()["x-ratelimit-remaining-requests"] == "10"
    world.caller = Caller(tenant="a", requests_per_minute=20)
    assert world.open().headers()["x-ratelimit-remaining-requests"] == "0"
    assert world.wait_for() == math.ceil(11 * 60 / 20)


def test_accounts_go_with_their_keys() -> None:
    world = World(requests=1)
    under_way = world.request()
    for name in "bcd":
        assert world.rates.open(Caller(tenant=name, tokens_per_minute=1)) is not None
    assert len(world.rates) == 4
    world.rates.keep_only(["a", "b"])
    assert len(world.rates) == 2
    world.rates.keep_only([])
    under_way.take_back()
    under_way.settle_tokens(5)
    assert len(world.rates) == 0


def test_a_bucket_gets_back_only_what_it_took() -> None:
    world = World(tokens=600)
    old = world.charge(300, 300)
    world.caller = Caller(tenant="a", requests_per_minute=9)
    world.open()
    world.caller = Caller(tenant="a", tokens_per_minute=600)
    world.charge(500, 0)
    old.settle_tokens(0)
    assert world.open().headers()["x-ratelimit-remaining-tokens"] == "100"


@given(
    st.integers(1, 500),
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(1, 200), st.integers(0, 200), st.integers(0, 3)), max_size=60
    ),
)
def test_no_key_gets_more_than_a_burst_and_what_time_gives(
    limit: int, requests: list[tuple[float, int, int, int]]
) -> None:
    """Against plain sums: what was used and what is reserved, at most the limit more than time has given."""
    world, used = World(tokens=limit), 0
    start_s = world.clock.now_s
    open_ones: list[tuple[Allowance, int, int]] = []  # with what they were charged and what they will use
    for pause_s, num_prompt, num_used, num_ending in requests:
        world.clock.now_s += pause_s
        for _ in range(min(num_ending, len(open_ones))):
            allowance, charge, will_use = open_ones.pop(0)
            allowance.settle_tokens(will_use)
            used += will_use
        try:
            allowance = world.charge(num_prompt, 200)
        except (RateLimited, InvalidRequest):
            continue
        charge = min(num_prompt + 200, limit)
        open_ones.append((allowance, charge, min(charge, num_prompt + num_used)))
        reserved = sum(charge for _, charge, _ in open_ones)
        elapsed_s = world.clock.now_s - start_s
        assert used + reserved <= limit + elapsed_s * limit / 60 + 1e-3
