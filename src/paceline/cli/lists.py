"""Lists on a command line: entries with commas between them."""

from __future__ import annotations

from paceline.errors import InputError


def split_list(text: str, flag: str) -> list[str]:
    """The parts of a list with commas, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{flag} '{text}' has an empty entry; separate entries by single commas")
    return list(dict.fromkeys(parts))
