"""The steps of a message one by one, from columns, which cost a watched engine the least.

The page does the same in `stage.js`. Knows the form of a message and nothing of engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def unpack_steps(delta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each step's figures, and a list under the name of every kind of change it made.

    Steps that were only counted repeat the one they are counted with, at even distances.
    """
    names = tuple(delta["steps"])
    noted = [dict(zip(names, figures, strict=True)) for figures in zip(*delta["steps"].values(), strict=True)]
    steps = [_following(step) for step in noted]
    for name, (places, *columns) in delta["changes"].items():
        for place, *entry in zip(places, *columns, strict=True):
            steps[place][0].setdefault(name, []).append(entry[0] if len(entry) == 1 else entry)
    return [step for several in steps for step in several]


def _following(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A step and those counted with it, which compute no prompt."""
    count, first_s = step["n"], step["t"]
    apart_s = (step["u"] - first_s) / max(1, count - 1)
    found = [{**step, "n": 1, "seq": step["seq"] + at, "t": first_s + at * apart_s} for at in range(count)]
    for later in found[1:]:
        later |= {"p": 0, "padding": step["pr"]}
    return found
