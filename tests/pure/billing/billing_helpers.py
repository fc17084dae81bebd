"""Quotes, records and rows of a ledger for tests."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from paceline.core.request import Cost
from paceline.server.access.caller import Prices
from paceline.server.billing.ledger_db import COMPLETE, Closing, Opening
from paceline.server.generate.request_record import RequestRecord

PRICES = Prices(
    prompt=Decimal("0.15"),
    cached_prompt=Decimal("0.05"),
    output=Decimal("0.6"),
    kv_block_second=Decimal("0.000002"),
)


def record(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "id": "r1",
        "route": "/v1/completions",
        "tenant": "team-a",
        "received_s": 0.0,
        "num_prompt": 100,
        "num_cached": 40,
        "num_output": 7,
        "queue_s": 0.25,
        "preemptions": 3,
        "finish_reason": "stop",
        "cost": Cost(block_us=9_000_000, redone_block_us=1_000_000, redone=12, swaps=1),
    }
    return RequestRecord(**(values | changes))


def opening(seq: int, **changes: Any) -> Opening:
    values: dict[str, Any] = {
        "seq": seq,
        "id": f"r{seq}",
        "opened_ms": 1_000_000 + seq,
        "key": "team-a",
        "service_class": "standard",
        "model": "tiny",
        "route": "/v1/completions",
        "prompt_tokens": 10,
        "factor": 1_000_000,
        "prompt_rate": 150_000,
        "cached_rate": 50_000,
        "output_rate": 600_000,
        "kv_rate": 0,
    }
    return Opening(**(values | changes))


def ended(seq: int, **changes: Any) -> Closing:
    values: dict[str, Any] = {
        "seq": seq,
        "closed_ms": 2_000_000 + seq,
        "state": COMPLETE,
        "reason": "stop",
        "cached_tokens": 4,
        "output_tokens": 5,
        "block_us": 1_500_000,
        "prompt_nano": 900,
        "cached_nano": 200,
        "output_nano": 3000,
    }
    return Closing(**(values | changes))
