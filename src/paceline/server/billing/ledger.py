"""The ledger as requests see it: an entry is opened without waiting, closed before the last frame is sent, then marked.

One thread writes. Whatever has come while it wrote is the next transaction, so that many requests that end together
share one write to the disk. When a write fails, the requests that waited for it fail and are not charged, no new
request is let in (`problem` says why), and the thread tries again until what it owes is written. Everything else
belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.server.billing.ledger_db import INCOMPLETE, Closing, LedgerDb, Opening, Voiding, now_ms
from paceline.server.errors import LedgerUnavailable

_logger = logging.getLogger("paceline.server")
RETRY_S = 0.5
REFUSAL = "the ledger cannot be written, so no requests are taken; the operator finds the reason in the log"


@dataclass(slots=True)
class _Batch:
    """What is to be written together."""

    openings: list[Opening] = field(default_factory=list)
    closings: list[tuple[Closing, asyncio.Future[None] | None]] = field(default_factory=list)
    voidings: list[Voiding] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.openings or self.closings or self.voidings)


class Ledger:
    """One ledger and its writing thread. `close` it at the end."""

    def __init__(self, db: LedgerDb) -> None:
        self._db = db
        self._next_seq = db.next_seq
        self._changed = threading.Condition()
        self._waiting = _Batch()
        self._is_closing = self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.problem = ""  # why nothing can be written, while that is so
        self.num_entries = 0  # closed since the start
        self.num_writes = 0
        self._thread = threading.Thread(target=self._run, name="paceline-ledger", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self._db.path

    @property
    def num_lost(self) -> int:
        """Entries a former server left open."""
        return self._db.num_lost

    def check(self) -> None:
        """Raises LedgerUnavailable while nothing can be written."""
        if self.problem:
            raise LedgerUnavailable(REFUSAL)

    def open(self, opening: Opening) -> int:
        """Note a request the engine was given; returns the number of its entry, which `opening` need not know."""
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        with self._changed:
            self._waiting.openings.append(replace(opening, seq=seq))
            self._changed.notify()
        return seq

    async def complete(self, closing: Closing) -> None:
        """Close an entry; returns when it is on the disk. Raises LedgerUnavailable when it is not and will not be.

        `release` it right before the last frame is sent, or `void` it when that is not sent any more.
        """
        self._loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = self._loop.create_future()
        self._put(closing, written)
        await written

    def release(self, seq: int) -> None:
        """The last frame of a complete entry is about to be sent. Raises LedgerUnavailable: then it must not be."""
        try:
            self._db.marks.note(seq)
        except OSError as error:
            _logger.error("the marks of the ledger %s cannot be written: %s", self._db.path, error)
            raise LedgerUnavailable(REFUSAL) from error

    def void(self, seq: int, reason: str) -> None:
        """The last frame of a complete entry was not sent."""
        with self._changed:
            self._waiting.voidings.append(Voiding(seq=seq, voided_ms=now_ms(), reason=reason))
            self._changed.notify()

    def give_up(self, closing: Closing) -> None:
        """Close an entry without waiting for the write."""
        self._put(closing, None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left and let go of the file. May be called twice."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if not self._thread.is_alive() and not self._is_closed:
            self._is_closed = True
            self._db.close(is_settled=not self.problem)

    def _put(self, closing: Closing, written: asyncio.Future[None] | None) -> None:
        with self._changed:
            self._waiting.closings.append((closing, written))
            self._changed.notify()

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        owed = _Batch()  # what a write that failed has left to do
        while True:
            with self._changed:
                if not self._waiting and not self._is_closing:
                    self._changed.wait(RETRY_S if owed else None)
                batch, self._waiting = self._waiting, _Batch()
                is_last = self._is_closing
            batch.openings[:0], batch.closings[:0] = owed.openings, owed.closings
            batch.voidings[:0] = owed.voidings
            owed = self._write(batch) if batch else _Batch()
            if is_last and not self._waiting:
                return

    def _write(self, batch: _Batch) -> _Batch:
        """Write a batch; returns what has to be tried again."""
        try:
            self._db.write(batch.openings, [closing for closing, _ in batch.closings], batch.voidings)
        except Exception as error:  # whatever it is: no task may wait for a thread that has ended
            self._fail(error, batch)
            # The waiting requests were answered with the failure: these entries only remain to be marked incomplete.
            owed = _Batch(batch.openings, voidings=batch.voidings)
            for closing, waiter in batch.closings:
                if waiter is not None:
                    seq, reason = closing.seq, "ledger_unavailable"
                    closing = Closing(seq=seq, closed_ms=now_ms(), state=INCOMPLETE, reason=reason)
                owed.closings.append((closing, None))
            return owed
        if self.problem:
            _logger.warning("the ledger is written again")
            self.problem = ""
        self.num_writes += 1
        self.num_entries += len(batch.closings)
        self._notify([waiter for _, waiter in batch.closings if waiter is not None], failed=False)
        return _Batch()

    def _fail(self, error: Exception, batch: _Batch) -> None:
        if not self.problem:
            _logger.error("the ledger %s cannot be written, no requests are taken: %s", self._db.path, error)
        self.problem = str(error)
        self._notify([waiter for _, waiter in batch.closings if waiter is not None], failed=True)

    def _notify(self, waiters: list[asyncio.Future[None]], *, failed: bool) -> None:
        if not waiters or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(_resolve, waiters, failed)
        except RuntimeError:  # the loop has ended, and with it every task that waited
            return


def _resolve(waiters: list[asyncio.Future[None]], failed: bool) -> None:
    for waiter in waiters:
        if waiter.done():  # its request went away meanwhile
            continue
        if failed:
            waiter.set_exception(LedgerUnavailable(REFUSAL))
        else:
            waiter.set_result(None)
