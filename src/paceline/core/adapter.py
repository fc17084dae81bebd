"""What is known of an adapter outside the runner: numbers for rows and plans, an identity for prefixes and receipts.

A number stands for one set of matrices and is never given again: a folder that is read anew gets another, so that rows
keep what they began with.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_ADAPTER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """An adapter that requests may name."""

    name: str
    folder: str
    number: int
    identity: str  # a digest of its matrices
    rank: int


# Of a request without an adapter.
NO_INFO = AdapterInfo(name="", folder="", number=NO_ADAPTER, identity="", rank=0)
