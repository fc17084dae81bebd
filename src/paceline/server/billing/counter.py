"""The counter of a server: quotes prices at the door, and opens the entries of requests that are let in.

Joins prices, the engine's load and the ledger, so that whoever starts a request has one thing to ask.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from paceline.process.client import EngineClient
from paceline.server.access.caller import FREE, Caller
from paceline.server.billing.charge import Charge, LedgerEntry
from paceline.server.billing.ledger import Ledger
from paceline.server.billing.ledger_db import Opening, now_ms
from paceline.server.billing.pricing import Pricing, Quote, engine_load
from paceline.server.call import Call
from paceline.server.generate.record import RequestRecord

RECEIPT_HEADER = "x-paceline-receipt"  # "true" asks for a receipt


class Counter:
    """One for each server."""

    def __init__(
        self, client: EngineClient, pricing: Pricing | None = None, ledger: Ledger | None = None
    ) -> None:
        self._client = client
        self._pricing = pricing or Pricing()
        self._ledger = ledger

    @property
    def ledger_path(self) -> Path | None:
        return None if self._ledger is None else self._ledger.path

    def check(self) -> None:
        """Raises LedgerUnavailable while nothing could be written down."""
        if self._ledger is not None:
            self._ledger.check()

    def quote(
        self, caller: Caller, service_class: str, under_way: int, max_price: Decimal | None = None
    ) -> Quote:
        """The prices of this moment, with so many answers under way.

        Raises PriceAboveMaximum or InvalidRequest when they are above what the request accepts.
        """
        stats, info = self._client.stats, self._client.info
        load = engine_load(under_way, info.max_num_seqs, stats.blocks_used, stats.blocks_total)
        quote = self._pricing.quote(caller.prices, service_class, load)
        self._pricing.check(quote, max_price)
        return quote

    def wants_receipt(self, call: Call) -> bool:
        """Whether usage carries a receipt: where something is billed or counted against the key, or the client asks."""
        caller = call.caller
        is_counted = caller.tokens_per_minute is not None or caller.requests_per_minute is not None
        asks = call.headers.get(RECEIPT_HEADER, "").strip().lower() == "true"
        return asks or is_counted or caller.prices != FREE or self._ledger is not None

    def open(self, quote: Quote, record: RequestRecord, model: str, *, hides_output: bool = False) -> Charge:
        """The engine has the request: from now on it has an entry."""
        if self._ledger is None:
            return Charge(quote, hides_output=hides_output)
        rates = quote.rates
        seq = self._ledger.open(
            Opening(
                seq=0,
                id=record.id,
                opened_ms=now_ms(),
                key=record.tenant,
                service_class=quote.service_class,
                model=model,
                route=record.route,
                prompt_tokens=record.num_prompt,
                factor=quote.factor,
                prompt_rate=rates.prompt,
                cached_rate=rates.cached_prompt,
                output_rate=rates.output,
                kv_rate=rates.kv_block_second,
            )
        )
        return Charge(quote, LedgerEntry(self._ledger, seq), hides_output=hides_output)
