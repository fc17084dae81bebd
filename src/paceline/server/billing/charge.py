"""What one request is charged: its receipt while it runs, its entry in the ledger when it is over.

A request is settled when all but its last frame is sent, and released right before that; then it is complete and pays
for everything. Any other is incomplete: it pays for its prompt and for the output that was sent, and for nothing where
nothing was sent or where the failure was ours. Tokens computed twice are never paid for, nor the blocks held meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.server.billing.ledger_db import COMPLETE, INCOMPLETE, Closing, now_ms
from paceline.server.billing.pricing import NOTHING, Amounts, Quote, Rates
from paceline.server.failures import LedgerUnavailable
from paceline.server.tenant import DEFAULT_CLASS

if TYPE_CHECKING:
    from paceline.server.billing.ledger import Ledger
    from paceline.server.call import RequestRecord

ABORT = "abort"  # the finish reason of a request whose client has left


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a ledger that was opened."""

    ledger: Ledger
    seq: int


class Charge:
    """The price of one request and, where there is a ledger, its entry there."""

    __slots__ = ("_entry", "_hides_output", "_is_over", "_is_settled", "amounts", "quote")

    def __init__(self, quote: Quote, entry: Entry | None = None, *, hides_output: bool = False) -> None:
        """`hides_output`: only the prompt was asked for, and the token it takes to read one is not shown."""
        self.quote = quote
        self.amounts: Amounts = NOTHING  # what it was charged in the end
        self._entry = entry
        self._hides_output = hides_output
        self._is_settled = False  # its entry is on the disk, or could not get there
        self._is_over = False

    def price(self, record: RequestRecord) -> Amounts:
        """What the request costs if it ends here and well."""
        cost = record.cost
        return self.quote.amounts(
            computed=max(0, record.num_prompt - record.num_cached),
            cached=min(record.num_cached, record.num_prompt),
            output=self._output(record.num_output),
            block_us=max(0, cost.block_us - cost.redone_block_us),
        )

    @property
    def waits(self) -> bool:
        """Whether the last frame has to wait for the ledger."""
        return self._entry is not None and not self._is_settled

    async def settle(self, record: RequestRecord) -> None:
        """Everything but the last frame is sent: put the request into the ledger. Raises LedgerUnavailable."""
        if not self.waits:
            return
        assert self._entry is not None
        self._is_settled = True
        output = self._output(record.num_output)
        reason = record.finish_reason
        closing = _closing(record, self._entry.seq, COMPLETE, reason, output, self.price(record))
        try:
            await self._entry.ledger.complete(closing)
        except LedgerUnavailable:
            self._is_over = True  # the ledger knows that it was not completed
            raise

    def release(self, record: RequestRecord) -> None:
        """The last frame is about to be sent: from now on the request is paid for. Raises LedgerUnavailable."""
        if self._entry is not None:
            assert self._is_settled, "written before it is sent"
            self._entry.ledger.release(self._entry.seq)
        self._is_over = True
        self.amounts = self.price(record)

    def give_up(self, record: RequestRecord) -> None:
        """The request is over; if it was not released, it came to no good end."""
        if self._is_over:
            return
        self._is_over = True
        if self._is_settled and self._entry is not None:
            self._entry.ledger.void(self._entry.seq, record.error_code or "not_sent")
            return
        is_ours = record.finish_reason != ABORT or bool(record.error_code)
        sent = 0 if is_ours else self._output(min(record.num_sent, record.num_output))
        if sent:
            self.amounts = self._sent_price(record, sent)
        if self._entry is not None:
            reason = record.error_code or record.finish_reason or "client_left"
            closing = _closing(record, self._entry.seq, INCOMPLETE, reason, sent, self.amounts)
            self._entry.ledger.give_up(closing)

    def _sent_price(self, record: RequestRecord, sent: int) -> Amounts:
        """Nobody heard how much of the prompt was cached: it counts as whichever is cheaper."""
        rates, prompt = self.quote.rates, record.num_prompt
        is_cheaper = rates.cached_prompt < rates.prompt
        computed, cached = (0, prompt) if is_cheaper else (prompt, 0)
        return self.quote.amounts(computed=computed, cached=cached, output=sent, block_us=0)

    def _output(self, tokens: int) -> int:
        return 0 if self._hides_output else tokens


def no_charge() -> Charge:
    """Of a request nobody has quoted a price for."""
    return Charge(Quote(service_class=DEFAULT_CLASS, rates=Rates()))


def receipt(record: RequestRecord) -> Mapping[str, Any]:
    """What `usage.paceline` says of a request that has ended well."""
    cost, charge = record.cost, record.charge
    quote, amounts = charge.quote, charge.price(record)
    return {
        "service_class": quote.service_class,
        "prompt_tokens_computed": max(0, record.num_prompt - record.num_cached),
        "prompt_tokens_cached": record.num_cached,
        "recomputed_tokens": cost.redone,
        "queue_ms": round((record.queue_s or 0.0) * 1e3, 3),
        "kv_block_seconds": cost.block_us / 1e6,
        "recompute_kv_block_seconds": cost.redone_block_us / 1e6,
        "preemptions": {"recompute": record.preemptions - cost.swaps, "swap": cost.swaps},
        "price": {**amount_values(amounts), **factor_values(quote)},
    }


def amount_values(amounts: Amounts) -> dict[str, int]:
    """Amounts by name, as receipts and estimates say them."""
    return {
        "total_nano_units": amounts.total,
        "prompt_nano_units": amounts.prompt,
        "cached_prompt_nano_units": amounts.cached_prompt,
        "output_nano_units": amounts.output,
        "kv_nano_units": amounts.kv,
    }


def factor_values(quote: Quote) -> dict[str, float]:
    """What the key's prices are multiplied with, and the load that was read off at."""
    found = {"class_factor": quote.factor / 1e6}
    return found if quote.load is None else {**found, "load": quote.load / 1e6}


def _closing(
    record: RequestRecord, seq: int, state: str, reason: str, output: int, amounts: Amounts
) -> Closing:
    cost = record.cost
    return Closing(
        seq=seq,
        closed_ms=now_ms(),
        state=state,
        reason=reason,
        cached_tokens=record.num_cached,
        output_tokens=output,
        recomputed_tokens=cost.redone,
        preemptions=record.preemptions,
        swaps=cost.swaps,
        queue_us=round((record.queue_s or 0.0) * 1e6),
        block_us=cost.block_us,
        redone_block_us=cost.redone_block_us,
        prompt_nano=amounts.prompt,
        cached_nano=amounts.cached_prompt,
        output_nano=amounts.output,
        kv_nano=amounts.kv,
    )
