"""Receipts in answers, the ledger before the last frame, and prices that are too high."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.server.access.caller import Caller, Prices
from paceline.server.billing.billing import Billing
from paceline.server.billing.ledger import Ledger
from paceline.server.billing.ledger_db import LedgerDb, reading
from paceline.server.billing.pricing import Pricing
from paceline.server.call import Events
from paceline.server.errors import LedgerUnavailable, PriceAboveMaximum, UnsupportedRoute
from tests.pure.server_api.api_helpers import Api, chunks, says

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/messages", "/v1/responses"),
)
TEXT = {"model": "tiny", "prompt": "hello"}
TURNS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": TURNS},
    COMPLETIONS: TEXT,
    MESSAGES: {"model": "tiny", "max_tokens": 9, "messages": TURNS},
    RESPONSES: {"model": "tiny", "input": "hi"},
}
PRICES = Prices(prompt=Decimal(1), cached_prompt=Decimal("0.5"), output=Decimal(10))
PAYER = Caller(tenant="payer", service_class="spot", prices=PRICES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def db(path: Path) -> LedgerDb:
    """The file behind `ledger`, which closes it."""
    return LedgerDb(path)


@pytest.fixture
def ledger(db: LedgerDb) -> Iterator[Ledger]:
    made = Ledger(db)
    yield made
    made.close()


def billed_api(ledger: Ledger, **options: Any) -> Api:
    api = Api(says("ab", "c", **options))
    api.service.billing = Billing(pricing=Pricing("spot=0.25:1"), ledger=ledger)
    return api


def entries(path: Path, columns: str = "key, class, route, state, output_tokens, total_nano") -> list[Any]:
    with closing(reading(path)) as connection:
        return connection.execute(f"SELECT {columns} FROM entries ORDER BY seq").fetchall()


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("streams", [False, True])
def test_every_route_writes_its_receipt_into_the_ledger(
    ledger: Ledger, path: Path, route: str, streams: bool
) -> None:
    api, body = billed_api(ledger), BODIES[route]
    if not streams:
        usage = api.ask(route, body, caller=PAYER)["usage"]
    else:
        options = {"stream_options": {"include_usage": True}} if route in (CHAT, COMPLETIONS) else {}
        last = [c for c in chunks(api.stream(route, {**body, **options}, caller=PAYER)) if "usage" in str(c)][
            -1
        ]
        usage = last.get("usage") or last["response"]["usage"]
    told = usage["paceline"]
    prompt = len(api.client.submitted[0]["tokens"])
    # A quarter of the prices: no other request is here.
    assert told["price"]["total_nano_units"] == prompt * 250 + 3 * 2500
    assert (told["service_class"], told["queue_ms"], told["price"]["load"]) == ("spot", 250.0, 0.0)
    expected = ("payer", "spot", route, "complete", 3, told["price"]["total_nano_units"])
    assert entries(path) == [expected]
    assert api.listener.records[0].charge.amounts.total == told["price"]["total_nano_units"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("caller", "headers", "is_told"),
    [
        (Caller(), {}, False),
        (Caller(), {"x-paceline-receipt": "true"}, True),
        (Caller(), {"x-paceline-receipt": "false"}, False),
        (Caller(prices=PRICES), {}, True),
        (Caller(tokens_per_minute=1000), {}, True),
        (Caller(requests_per_minute=10), {}, True),
        (Caller(max_concurrency=2), {}, False),
    ],
)
@pytest.mark.parametrize("route", BODIES)
def test_a_receipt_is_told_where_something_is_counted_or_the_client_asks(
    route: str, caller: Caller, headers: dict[str, str], is_told: bool
) -> None:
    whole = Api(says("ab", "c")).ask(route, BODIES[route], caller=caller, headers=headers)
    assert ("paceline" in whole["usage"]) == is_told
    options = {"stream_options": {"include_usage": True}} if route in (CHAT, COMPLETIONS) else {}
    stream = Api(says("ab", "c")).stream(route, {**BODIES[route], **options}, caller=caller, headers=headers)
    assert (b'"recomputed_tokens"' in stream) == is_told


def test_what_was_made_is_sent_before_the_entry_and_the_end_after_it(ledger: Ledger, path: Path) -> None:
    async def run() -> list[tuple[bytes, list[Any]]]:
        events = await api.open(COMPLETIONS, {**TEXT, "stream": True}, caller=PAYER)
        assert isinstance(events, Events)
        seen = []
        async for frame in events.frames:
            await asyncio.sleep(0.05)  # for an entry that were written too early to show
            seen.append((frame, [state for (state,) in entries(path, "state")]))
        return seen

    api = billed_api(ledger)
    seen = asyncio.run(run())
    assert [states for _, states in seen] == [["open"], ["open"], ["complete"]]
    assert b'"finish_reason":"length"' in seen[1][0] and b"[DONE]" not in seen[1][0]
    assert seen[2][0] == b"data: [DONE]\n\n"


def test_a_client_that_leaves_pays_for_what_it_got(ledger: Ledger, path: Path) -> None:
    async def run() -> None:
        events = await api.open(COMPLETIONS, {**TEXT, "stream": True}, caller=PAYER)
        assert isinstance(events, Events)
        await anext(events.frames)
        await anext(events.frames)  # asking for the second means that the first was written
        await events.frames.aclose()

    api = Api(says("ab", "c", "d"))
    api.service.billing = Billing(pricing=Pricing("spot=0.25:1"), ledger=ledger)
    asyncio.run(run())
    ledger.close()
    # The prompt counts as cached, which is cheaper, since it is not known how much of it was.
    assert entries(path) == [("payer", "spot", COMPLETIONS, "incomplete", 2, 5 * 125 + 2 * 2500)]


def test_a_whole_answer_whose_client_left_costs_nothing(ledger: Ledger, path: Path) -> None:
    async def run() -> None:
        task = asyncio.create_task(api.open(COMPLETIONS, TEXT, caller=PAYER))
        while not api.client.submitted:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    api = billed_api(ledger)
    asyncio.run(run())
    ledger.close()
    assert entries(path, "state, total_nano") == [("incomplete", 0)]
    assert api.is_at_rest


def test_the_token_behind_an_echo_is_not_billed(ledger: Ledger, path: Path) -> None:
    found = billed_api(ledger).ask(COMPLETIONS, {**TEXT, "echo": True, "max_tokens": 0}, caller=PAYER)
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["paceline"]["price"]["output_nano_units"] == 0
    assert entries(path, "state, output_tokens") == [("complete", 0)]


def test_a_ledger_that_fails_ends_the_stream_with_an_error_and_rejects_new_requests(
    db: LedgerDb, ledger: Ledger, path: Path
) -> None:
    api = billed_api(ledger)
    db.connection.execute("PRAGMA query_only = 1")
    data = api.stream(COMPLETIONS, TEXT, caller=PAYER)
    assert b'"code":"ledger_unavailable"' in data and b"[DONE]" not in data
    with pytest.raises(LedgerUnavailable):
        api.ask(COMPLETIONS, TEXT, caller=PAYER)
    assert len(api.client.submitted) == 1 and api.is_at_rest
    assert api.listener.records[0].charge.amounts.total == 0


def test_max_price() -> None:
    api = Api(says("ok"))
    api.service.billing = Billing(pricing=Pricing("spot=0.25:1"))
    api.ask(COMPLETIONS, {**TEXT, "max_price": 2.5}, caller=PAYER)
    api.service.admission.places_taken = 8  # as many as there are rows
    with pytest.raises(PriceAboveMaximum, match="cost 10 now") as refused:
        api.ask(COMPLETIONS, {**TEXT, "max_price": 9.99}, caller=PAYER)
    assert refused.value.retry_after_s == 5
    api.ask(COMPLETIONS, {**TEXT, "max_price": 10}, caller=PAYER)
    for price in (2.4999, 0):
        with pytest.raises(InvalidRequest, match="never less than 2.5") as never:
            api.ask(MESSAGES, {**BODIES[MESSAGES], "max_price": price}, caller=PAYER)
        assert never.value.param == "max_price"
    assert len(api.client.submitted) == 2


@pytest.mark.parametrize("price", [-1, "3", True, None, 1e10, [1]])
def test_prices_that_are_none(price: Any) -> None:
    api = Api()
    if price is None:
        api.ask(COMPLETIONS, {**TEXT, "max_price": None})
        return
    with pytest.raises(InvalidRequest) as refused:
        api.ask(COMPLETIONS, {**TEXT, "max_price": price})
    assert refused.value.param == "max_price"


def test_usage_without_and_with_a_ledger(ledger: Ledger) -> None:
    with pytest.raises(UnsupportedRoute, match="start it with --ledger FILE"):
        Api().ask("/v1/admin/usage", method="GET")
    api = billed_api(ledger)
    api.ask(COMPLETIONS, TEXT, caller=PAYER)
    (row,) = api.ask("/v1/admin/usage", method="GET")["data"]
    assert (row["key"], row["requests"], row["output_tokens"]) == ("payer", 1, 3)
