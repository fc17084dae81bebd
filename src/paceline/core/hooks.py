"""Per-request hooks: the work the engine does for one request inside the step loop, behind one seam.

Anything here may raise; the scheduler then fails that request and no other. The default does nothing, which is
what a simulation without token ids wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.request import BlockKey, Request


class RequestHooks(Protocol):
    """What the engine adds to a request's life."""

    def admit(self, request: Request) -> None:
        """The request is about to be given a row."""
        ...

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        """Keys of the full blocks of `request.tokens` that `request.keys` does not cover yet."""
        ...

    def finish(self, request: Request) -> None:
        """The request has ended; its terminal event follows."""
        ...


class NoHooks:
    """Hooks that do nothing."""

    def admit(self, request: Request) -> None:
        return None

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        return ()

    def finish(self, request: Request) -> None:
        return None
