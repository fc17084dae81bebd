"""Billing of a server: quotes prices when a request arrives, and opens the ledger entries of admitted requests.

Joins prices, the engine's load and the ledger. Opened before anything else is, so that a mistake in its options ends
the server before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from paceline.config.server import BillingConfig
from paceline.process.client import EngineClient
from paceline.server.access.caller import FREE, Caller
from paceline.server.billing.charge import Charge
from paceline.server.billing.ledger import Ledger
from paceline.server.billing.ledger_db import LedgerDb, Opening, now_ms
from paceline.server.billing.pricing import Pricing, Quote, engine_load
from paceline.server.call import Call
from paceline.server.generate.request_record import RequestRecord
from paceline.server.logs import log

RECEIPT_HEADER = "x-paceline-receipt"  # "true" requests a receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Billing:
    """The prices and the ledger of one server."""

    pricing: Pricing = field(default_factory=Pricing)
    ledger: Ledger | None = None

    @property
    def hindrance(self) -> str:
        """The state of a server that cannot write its ledger, in one word."""
        return "ledger_unavailable" if self.ledger is not None and self.ledger.problem else ""

    def gauges(self) -> list[tuple[str, str, float]]:
        ledger = self.ledger
        if ledger is None:
            return []
        return [
            ("ledger_up", "1 when the ledger can be written.", float(not ledger.problem)),
            ("ledger_entries", "Entries of the ledger closed since the start.", ledger.num_entries),
            ("ledger_writes", "Transactions that ledger entries took.", ledger.num_writes),
        ]

    def report(self) -> None:
        """Log what a former server left behind."""
        if self.ledger is not None and self.ledger.num_lost:
            log("entries of the ledger that were left open are incomplete", entries=self.ledger.num_lost)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    def check(self) -> None:
        """Raises LedgerUnavailable while nothing could be written down."""
        if self.ledger is not None:
            self.ledger.check()

    def quote(
        self,
        client: EngineClient,
        caller: Caller,
        service_class: str,
        under_way: int,
        max_price: Decimal | None = None,
    ) -> Quote:
        """The prices of this moment, with `under_way` answers being generated.

        Raises PriceAboveMaximum or InvalidRequest when they are above what the request accepts.
        """
        stats, info = client.stats, client.info
        load = engine_load(under_way, info.max_num_seqs, stats.blocks_used, stats.blocks_total)
        quote = self.pricing.quote(caller.prices, service_class, load)
        self.pricing.check(quote, max_price)
        return quote

    def wants_receipt(self, call: Call) -> bool:
        """Whether usage carries a receipt: if something is billed or counted against the key, or on request."""
        caller = call.caller
        is_counted = caller.tokens_per_minute is not None or caller.requests_per_minute is not None
        asks = call.headers.get(RECEIPT_HEADER, "").strip().lower() == "true"
        return asks or is_counted or caller.prices != FREE or self.ledger is not None

    def open(self, quote: Quote, record: RequestRecord, model: str, *, hides_output: bool = False) -> Charge:
        """The engine has the request: from now on it has an entry."""
        if self.ledger is None:
            return Charge(quote, hides_output=hides_output)
        rates = quote.rates
        seq = self.ledger.open(
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
        return Charge(quote, (self.ledger, seq), hides_output=hides_output)


def open_billing(config: BillingConfig) -> Billing:
    """Raises ConfigError for bad price factors, BadLedger for a ledger that cannot be used."""
    pricing = Pricing(config.price_factors)
    if config.ledger is None:
        return Billing(pricing=pricing)
    return Billing(pricing=pricing, ledger=Ledger(LedgerDb(config.ledger)))
