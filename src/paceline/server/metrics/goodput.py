"""Requests that had the times they were to have: those they asked for, or those the operator has set for all.

A request is judged by its own wishes where it has them and by the server's for the rest; spot work and batches, which
no reader waits for, by their own alone. One that did not end well has missed. Belongs to the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.server import ObserveConfig
from paceline.core.service_class import BATCH, SPOT
from paceline.server.access.caller import CLASSES, DEFAULT_CLASS
from paceline.server.generate.request_record import RequestRecord

OWN, SERVER = "own", "server"  # who set the times
MET, MISSED = "met", "missed"
PATIENT = (SPOT, BATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Longest times a request may take, in ms: in all, to the first token, and between tokens on average."""

    e2e_ms: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None

    @classmethod
    def of(cls, config: ObserveConfig) -> Times:
        return cls(e2e_ms=config.slo_e2e_ms, ttft_ms=config.slo_ttft_ms, itl_ms=config.slo_itl_ms)

    def over(self, other: Times) -> Times:
        """These, and where there are none those of the other."""
        return Times(
            e2e_ms=other.e2e_ms if self.e2e_ms is None else self.e2e_ms,
            ttft_ms=other.ttft_ms if self.ttft_ms is None else self.ttft_ms,
            itl_ms=other.itl_ms if self.itl_ms is None else self.itl_ms,
        )


NONE = Times()


class Goodput:
    """Told of endings."""

    def __init__(self, server: Times = NONE) -> None:
        self._server = server
        self.counts = {
            (name, source, result): 0
            for name in CLASSES
            for source in (OWN, SERVER)
            for result in (MET, MISSED)
        }

    def finished(self, record: RequestRecord) -> None:
        own = wishes_of(record)
        name = record.service_class if record.service_class in CLASSES else DEFAULT_CLASS
        times = own if name in PATIENT else own.over(self._server)
        if times != NONE:
            source = SERVER if own == NONE else OWN
            self.counts[name, source, MET if is_met(record, times) else MISSED] += 1

    def total(self, result: str) -> int:
        return sum(count for (_, _, found), count in self.counts.items() if found == result)


def wishes_of(record: RequestRecord) -> Times:
    """What a request itself asked for."""
    deadline_ms, ttft_ms, itl_ms = record.wishes
    return Times(e2e_ms=deadline_ms, ttft_ms=ttft_ms, itl_ms=itl_ms)


def is_met(record: RequestRecord, times: Times) -> bool:
    """Whether a request ended well and had its first token, its tokens and its end in time."""
    first_s, end_s = record.first_token_s, record.finished_s
    if record.finish_reason not in ("stop", "length") or first_s is None or end_s is None:
        return False
    gaps = max(1.0, record.num_output / max(1, record.num_branches) - 1.0)
    seen = (
        (times.e2e_ms, end_s - record.received_s),
        (times.ttft_ms, first_s - record.received_s),
        (times.itl_ms, (end_s - first_s) / gaps if record.num_output > record.num_branches else 0.0),
    )
    return all(most_ms is None or seen_s <= most_ms / 1e3 for most_ms, seen_s in seen)
