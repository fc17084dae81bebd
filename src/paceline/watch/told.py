"""The steps of a message one by one: figures and changes come in columns, which cost a watched engine the least.

What the page does in its own language. Knows the form of a message and nothing of engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def told_steps(cut: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each step's figures, and under the name of every change that it made a list of these."""
    names = tuple(cut["steps"])
    steps = [dict(zip(names, figures, strict=True)) for figures in zip(*cut["steps"].values(), strict=True)]
    for name, (places, *columns) in cut["changes"].items():
        for place, *entry in zip(places, *columns, strict=True):
            steps[place].setdefault(name, []).append(entry[0] if len(entry) == 1 else entry)
    return steps
