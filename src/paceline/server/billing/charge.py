"""What one request is charged: its receipt while it runs, its entry in the ledger when it is over.

A request is settled when all but its last frame is sent, and released right before that; then it is complete and pays
for everything. Any other is incomplete: it pays for its prompt and for the output that was sent, and for nothing where
nothing was sent or where the failure was ours. Tokens computed twice are never paid for, nor the blocks held meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.request import NO_COST, Cost
from paceline.core.service_class import DEFAULT_CLASS
from paceline.server.billing.ledger_db import COMPLETE, INCOMPLETE, Closing, now_ms
from paceline.server.billing.pricing import NOTHING, Amounts, Quote, Rates
from paceline.server.errors import LedgerUnavailable

if TYPE_CHECKING:
    from paceline.server.billing.ledger import Ledger

ABORT = "abort"  # the finish reason of a request whose client has left


@dataclass(slots=True, kw_only=True)
class Consumption:
    """What one request has taken so far, and how it ended: all that its price depends on."""

    num_prompt: int = 0
    num_cached: int = 0
    num_image: int = 0  # of the prompt's tokens, those that stand for pictures
    num_output: int = 0
    num_vectors: int = 0  # prompts that came to a vector
    # Of the output tokens, those whose frames were written; whole answers are sent at once.
    num_sent: int = 0
    queue_s: float | None = None
    preemptions: int = 0
    failovers: int = 0  # times that it went on in another engine
    cost: Cost = NO_COST  # of all branches that have ended
    finish_reason: str = ""  # stop, length, abort or error; of the first branch that did not end well, if any
    error_code: str = ""
    adapter: str = ""  # identity of the one it was computed with


class Charge:
    """The price of one request and, where there is a ledger, its entry there."""

    __slots__ = ("_entry", "_hides_output", "_is_over", "_is_settled", "amounts", "quote")

    def __init__(
        self, quote: Quote, entry: tuple[Ledger, int] | None = None, *, hides_output: bool = False
    ) -> None:
        """`entry`: a ledger and the number of the entry that was opened there. `hides_output`: only the prompt was
        asked for, and the token it takes to read one is not shown."""
        self.quote = quote
        self.amounts: Amounts = NOTHING  # what it was charged in the end
        self._entry = entry
        self._hides_output = hides_output
        self._is_settled = False  # its entry is on the disk, or could not get there
        self._is_over = False

    def price(self, used: Consumption) -> Amounts:
        """What the request costs if it ends here and well."""
        cost = used.cost
        return self.quote.amounts(
            computed=max(0, used.num_prompt - used.num_cached),
            cached=min(used.num_cached, used.num_prompt),
            host=cost.from_host,
            disk=cost.from_disk,
            output=self._output(used.num_output),
            block_us=max(0, cost.block_us - cost.redone_block_us) + cost.pinned_block_us,
        )

    @property
    def waits(self) -> bool:
        """Whether the last frame has to wait for the ledger."""
        return self._entry is not None and not self._is_settled

    async def settle(self, used: Consumption) -> None:
        """Everything but the last frame is sent: put the request into the ledger. Raises LedgerUnavailable."""
        if not self.waits:
            return
        assert self._entry is not None
        ledger, seq = self._entry
        self._is_settled = True
        output = self._output(used.num_output)
        reason = used.finish_reason
        closing = _closing(used, seq, COMPLETE, reason, output, self.price(used))
        try:
            await ledger.complete(closing)
        except LedgerUnavailable:
            self._is_over = True  # the ledger knows that it was not completed
            raise

    def release(self, used: Consumption) -> None:
        """The last frame is about to be sent: from now on the request is paid for. Raises LedgerUnavailable."""
        if self._entry is not None:
            assert self._is_settled, "written before it is sent"
            ledger, seq = self._entry
            ledger.release(seq)
        self._is_over = True
        self.amounts = self.price(used)

    def give_up(self, used: Consumption) -> None:
        """The request is over; if it was not released, it came to no good end."""
        if self._is_over:
            return
        self._is_over = True
        if self._is_settled and self._entry is not None:
            ledger, seq = self._entry
            ledger.void(seq, used.error_code or "not_sent")
            return
        is_ours = used.finish_reason != ABORT or bool(used.error_code)
        sent = 0 if is_ours else self._output(min(used.num_sent, used.num_output))
        if sent:
            self.amounts = self._sent_price(used, sent)
        if self._entry is not None:
            reason = used.error_code or used.finish_reason or "client_left"
            ledger, seq = self._entry
            ledger.give_up(_closing(used, seq, INCOMPLETE, reason, sent, self.amounts))

    def _sent_price(self, used: Consumption, sent: int) -> Amounts:
        """The answer ended before it said how much of the prompt was cached: the cheaper of both is charged."""
        rates, prompt = self.quote.rates, used.num_prompt
        is_cheaper = rates.cached_prompt < rates.prompt
        computed, cached = (0, prompt) if is_cheaper else (prompt, 0)
        return self.quote.amounts(computed=computed, cached=cached, output=sent, block_us=0)

    def _output(self, tokens: int) -> int:
        return 0 if self._hides_output else tokens


def no_charge() -> Charge:
    """Of a request for which no price was quoted."""
    return Charge(Quote(service_class=DEFAULT_CLASS, rates=Rates()))


def receipt(used: Consumption, charge: Charge) -> Mapping[str, Any]:
    """What `usage.paceline` says of a request that has ended well."""
    cost, quote, amounts = used.cost, charge.quote, charge.price(used)
    return {
        "service_class": quote.service_class,
        **({"adapter": used.adapter} if used.adapter else {}),
        "prompt_tokens_computed": max(0, used.num_prompt - used.num_cached - cost.reused),
        "prompt_tokens_cached": used.num_cached,
        **_below(cost),
        "recomputed_tokens": cost.redone,
        **({"vectors": used.num_vectors} if used.num_vectors else {}),
        **({"lossy": True, "kv_dropped_tokens": cost.dropped} if cost.dropped else {}),
        **({"encoded_units": cost.encoded_units} if cost.encoded_units else {}),
        **({"encodings_reused": cost.encodings_reused} if cost.encodings_reused else {}),
        **(
            {"reused_tokens": cost.reused, "reused_tokens_recomputed": cost.recomputed} if cost.reused else {}
        ),
        **({"failovers": used.failovers} if used.failovers else {}),
        "queue_ms": round((used.queue_s or 0.0) * 1e3, 3),
        "kv_block_seconds": cost.block_us / 1e6,
        **(
            {"pinned_kv_blocks": cost.pinned, "pinned_kv_block_seconds": cost.pinned_block_us / 1e6}
            if cost.pinned
            else {}
        ),
        "recompute_kv_block_seconds": cost.redone_block_us / 1e6,
        "preemptions": {"recompute": used.preemptions - cost.swaps, "swap": cost.swaps},
        "price": {**amount_values(amounts), **factor_values(quote)},
    }


def _below(cost: Cost) -> dict[str, int]:
    """Of the cached tokens, those that were loaded from host memory and from a disk, where there are any."""
    loaded = {"prompt_tokens_cached_host": cost.from_host, "prompt_tokens_cached_disk": cost.from_disk}
    return loaded if any(loaded.values()) else {}


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


def _closing(used: Consumption, seq: int, state: str, reason: str, output: int, amounts: Amounts) -> Closing:
    cost = used.cost
    return Closing(
        seq=seq,
        closed_ms=now_ms(),
        state=state,
        reason=reason,
        cached_tokens=used.num_cached,
        output_tokens=output,
        recomputed_tokens=cost.redone,
        preemptions=used.preemptions,
        swaps=cost.swaps,
        queue_us=round((used.queue_s or 0.0) * 1e6),
        block_us=cost.block_us + cost.pinned_block_us,
        redone_block_us=cost.redone_block_us,
        prompt_nano=amounts.prompt,
        cached_nano=amounts.cached_prompt,
        output_nano=amounts.output,
        kv_nano=amounts.kv,
    )
