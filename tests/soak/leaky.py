"""The inspected server with leaks in it, to see that the judge finds them: memory, permits, tasks and KV blocks."""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from typing import Any

from paceline.kv.manager import KVManager
from paceline.server.generate.request_admission import Permit, RequestAdmission
from paceline.server.request_log import RequestLog
from tests.soak.inspected import run

EVERY = 40  # how many go well between two that leak
MOST_BLOCK_LEAKS = 3  # with more the pool would be empty before the run is over
KEPT: list[Any] = []
_ended, _give_back_places, _give_back = (
    RequestLog.ended,
    RequestAdmission.give_back_places,
    KVManager._give_back,
)
_numbers = {name: count(1) for name in ("tasks", "permits", "blocks")}


def _is_time(name: str) -> bool:
    return next(_numbers[name]) % EVERY == 0


def leak_memory_and_tasks(self: RequestLog, exchange: Any) -> None:
    KEPT.append(bytes(65_536))  # so much that a short run shows it
    if _is_time("tasks"):
        KEPT.append(asyncio.get_running_loop().create_task(asyncio.sleep(1e6)))
    _ended(self, exchange)


def leak_permits(self: RequestAdmission, permit: Permit, tenant: str) -> None:
    if not _is_time("permits"):
        _give_back_places(self, permit, tenant)


def leak_blocks(self: KVManager, group: int, blocks: Any, seq: int, level: int = 0) -> None:
    if next(_numbers["blocks"]) > MOST_BLOCK_LEAKS:
        _give_back(self, group, blocks, seq, level)


if __name__ == "__main__":
    RequestLog.ended = leak_memory_and_tasks  # type: ignore[method-assign]
    RequestAdmission.give_back_places = leak_permits  # type: ignore[method-assign]
    KVManager._give_back = leak_blocks  # type: ignore[method-assign]
    run("tests.soak.leaky", sys.argv[1:])
