"""A race: the same requests under several batching modes, each mode a recording, run one after the other.

Owns what the race page is told about the runs as a whole. The messages of a run are its recording's, which may still
grow while the page reads it. Knows nothing of engines, files and sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.server.live.recording import BUNDLE, Recording
from paceline.version import __version__


class Race:
    """Recordings in the order they run. Filled in one thread and read in another."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        *,
        what: str,
        is_live: bool,
        starts: Mapping[str, float] | None = None,
    ) -> None:
        """`what`: model, device and sizes in words; `starts`: when runs began, where that is before their recording."""
        self.recordings = recordings
        self.num_requests: int | None = None  # of every run, once it is known
        self._what = what
        self._is_live = is_live
        self._starts = starts or {}

    def recording(self, name: str) -> Recording:
        return next(each for each in self.recordings if each.name == name)

    def values(self) -> dict[str, Any]:
        """How the race stands."""
        return {
            "version": __version__,
            "what": self._what,
            "is_live": self._is_live,
            "num_requests": self.num_requests,
            "bundle": BUNDLE,
            "tracks": [self._track(each) for each in self.recordings],
        }

    def _track(self, recording: Recording) -> dict[str, Any]:
        has_begun = bool(recording.times)
        return {
            "name": recording.name,
            "rows": recording.num_rows,
            "state": "over" if recording.is_over else "running" if has_begun else "waiting",
            "start_s": self._starts.get(recording.name, recording.times[0]) if has_begun else None,
            "now_s": recording.now_s(),
            "num_messages": len(recording.times),
            "answers": list(recording.answers),
        }
