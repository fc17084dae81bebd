"""What a caller is told about when an answer will come, in the headers of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from paceline.serving.client import Prospect


class ProspectHeaders(Mapping[str, str]):
    """Other headers, and those of a prospect as soon as there is one: they are read when the status goes out."""

    def __init__(self, others: Mapping[str, str], prospect: Callable[[], Prospect | None]) -> None:
        self._others = others
        self._prospect = prospect

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, str]:
        found = self._prospect()
        headers = dict(self._others)
        if found is not None and found.first_token_s is not None and found.finish_s is not None:
            headers["x-paceline-queue-position"] = str(found.ahead)
            headers["x-paceline-predicted-ttft-ms"] = str(milliseconds(found.first_token_s))
            headers["x-paceline-predicted-finish-ms"] = str(milliseconds(found.finish_s))
        return headers


def milliseconds(seconds: float) -> int:
    return max(0, round(1e3 * seconds))
