"""What frames need on a link between machines: a version that both sides have, and times without a common clock."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from paceline.process import frames


def protocol() -> str:
    """What both sides of a link must agree on: a digest of all frames, so that none can change without it."""
    return hashlib.blake2b(
        repr(_shapes([frames.ToEngine, frames.FromEngine])).encode(), digest_size=8
    ).hexdigest()


def _shapes(types: Sequence[Any]) -> Any:
    _, found = msgspec.json.schema_components(types)
    return sorted((name, _undescribed(each)) for name, each in found.items())


def _undescribed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _undescribed(each) for name, each in value.items() if name != "description"}
    return [_undescribed(each) for each in value] if isinstance(value, list) else value


def moved(frame: frames.FromEngine, by_s: float) -> frames.FromEngine:
    """A frame with its times moved. Clocks of two machines have nothing in common: an engine elsewhere moves times by
    minus its now, so that they say how long ago, and who reads them by his own."""
    if isinstance(frame, frames.Update):
        endings = [each._replace(time_s=each.time_s + by_s) for each in frame.endings]
        held = [each._replace(until_s=each.until_s + by_s) for each in frame.held]
        return replace(frame, time_s=frame.time_s + by_s, endings=endings, held=held)
    if isinstance(frame, frames.Explained):
        told = [each._replace(time_s=each.time_s + by_s) for each in frame.explanation.decisions]
        return replace(frame, explanation=frame.explanation._replace(decisions=told))
    return frame
