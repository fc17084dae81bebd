"""Prices and ledger of a server, opened before anything else is: a mistake there ends it before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.server import BillingConfig
from paceline.server.billing.ledger import Ledger
from paceline.server.billing.ledger_db import LedgerDb
from paceline.server.billing.pricing import Pricing
from paceline.server.logs import log


@dataclass(frozen=True, slots=True, kw_only=True)
class Billing:
    """What a server bills by."""

    pricing: Pricing
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
        """Tell the log what a former server left behind."""
        if self.ledger is not None and self.ledger.num_lost:
            log("entries of the ledger that were left open are incomplete", entries=self.ledger.num_lost)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()


def open_billing(config: BillingConfig) -> Billing:
    """Raises ConfigError for factors that are none, BadLedger for a ledger that cannot be used."""
    pricing = Pricing(config.price_factors)
    if config.ledger is None:
        return Billing(pricing=pricing)
    return Billing(pricing=pricing, ledger=Ledger(LedgerDb(config.ledger)))
