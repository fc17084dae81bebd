"""How a time is told in a sentence."""

from __future__ import annotations


def told_time(seconds: float) -> str:
    """`250 ms`, `1.5 s`: three digits, or tenths of a second from one second on."""
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
