"""Exact amounts: prices as written become whole numbers, and nothing is ever a float again.

A unit is whatever the operator counts in. Amounts are whole nano-units; prices of tokens are micro-units for a million
tokens, which is the same as pico-units for one; factors and loads are millionths. A product is rounded down to a
nano-unit once, when an amount is made of it.
"""

from __future__ import annotations

from decimal import Decimal

MILLION = 1_000_000
TOKEN_DECIMALS = 6  # of a price for a million tokens
BLOCK_DECIMALS = 9  # of a price for a KV block and second
FACTOR_DECIMALS = 6
# Nano-units (more than a billion units): fits a column of the ledger with room to add.
LARGEST_AMOUNT = 2**60


def decimal_of(value: float | str) -> Decimal:
    """The number that was written: JSON and YAML hand over floats, whose shortest text is what stood there."""
    return Decimal(str(value))


def scaled(value: Decimal, decimals: int) -> int:
    """A number in its smallest parts. Raises ValueError when it has more decimals than that."""
    whole = value.scaleb(decimals)
    if whole != whole.to_integral_value():
        raise ValueError(f"{value} has more than {decimals} decimals")
    return int(whole)


def tokens_amount(tokens: int, rate: int, factor: int) -> int:
    """Nano-units for tokens at `rate` micro-units a million, times `factor` millionths."""
    return min(tokens * rate * factor // 10**9, LARGEST_AMOUNT)


def blocks_amount(block_us: int, rate: int, factor: int) -> int:
    """Nano-units for block-microseconds at `rate` nano-units a block and second, times `factor` millionths."""
    return min(block_us * rate * factor // 10**12, LARGEST_AMOUNT)


def shown(amount: int, decimals: int = 9) -> str:
    """An amount in units, with no more decimals than it has."""
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    whole, rest = divmod(amount, 10**decimals)
    places = f"{rest:0{decimals}}".rstrip("0")
    return f"{sign}{whole}.{places}" if places else f"{sign}{whole}"
