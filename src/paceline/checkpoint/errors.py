"""What is wrong with a model on disk, told to users. Every fault of a file ends here, whatever the file holds."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import InputError

NAMED = 4  # so many of a list are named, the rest are counted


class CheckpointError(InputError):
    """A model's files are missing, broken, or of a kind that cannot be run."""


def some_of(items: Sequence[str]) -> str:
    """The first few of a list and how many more there are."""
    named = ", ".join(items[:NAMED])
    rest = len(items) - NAMED
    return f"{named} and {rest} more" if rest > 0 else named


def shown(value: object) -> str:
    """A value from a file, short enough for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
