"""Authentication: keys by the hash of their text, compared in constant time over all of them.

Owns the comparison and what a key allows. Files are read in `keys_file`; `http.asgi` decides which routes need a key.
Without any key, every client is the default tenant.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.server.access.caller import Caller
from paceline.server.errors import Refusal
from paceline.server.http.request_headers import RawHeaders, presented_key

# Without keys only this machine reaches the server, and every process on it may do everything.
DEFAULT_CALLER = Caller(is_admin=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(Caller):
    """One key: its hash, and the caller whose requests bring it."""

    sha256: bytes
    enabled: bool = True


class Keyring:
    """The keys that are let in. Replaced as a whole when the file is read again."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def callers(self) -> Sequence[Caller]:
        """The callers of all enabled keys."""
        return [key for key in self._keys if key.enabled]

    @property
    def weights(self) -> dict[str, float]:
        """The share of each tenant: what a policy that shares fairly between tenants goes by."""
        return {key.tenant: key.weight for key in self._keys}

    def caller_of(self, tenant: str) -> Caller | None:
        """The caller of a tenant; None without an enabled key."""
        known = self.callers if self._keys else (DEFAULT_CALLER,)
        return next((caller for caller in known if caller.tenant == tenant), None)

    def admit(self, headers: RawHeaders) -> Caller:
        """The caller of a request; raises `Refusal` for an unknown key."""
        if not self._keys:
            return DEFAULT_CALLER
        presented = presented_key(headers)
        digest = hashlib.sha256(presented or b"").digest()
        found: Key | None = None
        for key in self._keys:  # all of them, always: time tells nothing
            if hmac.compare_digest(digest, key.sha256):
                found = key
        if presented is None or found is None:
            raise Refusal("invalid_api_key")
        if not found.enabled:
            raise Refusal("key_disabled")
        return found
