"""Which route a request means: exact paths first, then templates, on the bytes the client sent.

Nothing is decoded, joined or normalised before the match, so that no spelling of a path can reach a route whose
rules were checked for another. Only a template's parameters are decoded, after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from paceline.server.api.route import Route

_PARAMETER = re.compile(r"\{([a-z_]+)(:path)?\}")


@dataclass(frozen=True, slots=True)
class Match:
    """A path that exists; `route` is None when it does not take the method."""

    template: str
    route: Route | None
    parameters: Mapping[str, str]
    allowed: tuple[str, ...]


class RouteTable:
    """All routes of a listener."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, list[Route]] = {}
        self._templates: dict[str, tuple[re.Pattern[str], list[Route]]] = {}
        for route in self.routes:
            if _PARAMETER.search(route.path):
                entry = self._templates.setdefault(route.path, (_pattern(route.path), []))
                entry[1].append(route)
            else:
                self._exact.setdefault(route.path, []).append(route)

    def match(self, raw_path: bytes, method: str) -> Match | None:
        """The route of a path as it was sent, or None."""
        path = raw_path.decode("latin-1")
        routes = self._exact.get(path)
        if routes is not None:
            return _chosen(path, routes, method, {})
        for template, (pattern, candidates) in self._templates.items():
            found = pattern.fullmatch(path)
            if found is not None:
                parameters = {name: unquote(value) for name, value in found.groupdict().items()}
                return _chosen(template, candidates, method, parameters)
        return None


def _chosen(template: str, routes: list[Route], method: str, parameters: Mapping[str, str]) -> Match:
    allowed: list[str] = []
    for route in routes:
        methods = (*route.methods, "HEAD") if "GET" in route.methods else route.methods
        if method in methods:
            return Match(template, route, parameters, ())
        allowed += methods
    return Match(template, None, parameters, tuple(dict.fromkeys(allowed)))


def _pattern(template: str) -> re.Pattern[str]:
    parts: list[str] = []
    end = 0
    for found in _PARAMETER.finditer(template):
        parts.append(re.escape(template[end : found.start()]))
        parts.append(f"(?P<{found.group(1)}>{'.+' if found.group(2) else '[^/]+'})")
        end = found.end()
    return re.compile("".join(parts) + re.escape(template[end:]))
