"""The server that `paceline bench` puts load on: where it is, what it serves, what it tells about itself.

Asked once, before anything is timed. What a server does not tell is left out; only a model's name is needed.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from paceline.bench.load.bodies import PATHS
from paceline.bench.load.pool import Target
from paceline.cli.remote import UNKNOWN_LENGTH, Connection, Remote, ServerRefused, admin_connection
from paceline.errors import InputError


class BenchServer:
    """A server, with the model that is measured."""

    def __init__(self, url: str, model: str | None, api: str) -> None:
        self._remote = remote = Remote(url, model)
        # As results may show it: without a password that somebody wrote into it.
        self.url = f"http{'s' if remote.is_https else ''}://{remote.address}{remote.base_path}"
        self.model = self._remote.model
        self.key = self._remote.key
        known = self._remote.max_model_len
        self.max_model_len = None if known == UNKNOWN_LENGTH else known
        self._api = api

    @property
    def target(self) -> Target:
        remote = self._remote
        parts = urlsplit(f"//{remote.address}")
        try:
            port = parts.port or (443 if remote.is_https else 80)
        except ValueError:
            raise InputError(f"--url {self.url}: the port is no number between 1 and 65535") from None
        assert parts.hostname is not None
        return Target(
            host=parts.hostname,
            port=port,
            is_https=remote.is_https,
            path=remote.base_path + PATHS[self._api],
        )

    def facts(self) -> dict[str, Any]:
        """For the record: version, longest sequence, and for an operator the engine and its device."""
        facts: dict[str, Any] = {"url": self.url, "model": self.model, "max_model_len": self.max_model_len}
        version = told_by(self._remote, "/version")
        if version is not None:
            facts["version"] = version.get("version")
        about = told_by(admin_connection(self.url), "/v1/admin/about")
        if about is not None and "engine" in about:
            facts["engine"] = about["engine"]
        return facts


def told_by(connection: Connection, path: str) -> dict[str, Any] | None:
    """What a server answers; None where it does not, or not to this key."""
    try:
        found: dict[str, Any] = connection.ask("GET", path)
    except ServerRefused:
        return None
    return found
