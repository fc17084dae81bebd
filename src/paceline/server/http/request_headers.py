"""What a request says about itself before its body is read: id, Host, content type, credentials.

Pure functions over the headers of an ASGI scope. Names and values are bytes there; what is not ASCII never gets
further than this module.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.server.errors import Refusal

RawHeaders = Iterable[tuple[bytes, bytes]]
CONNECTION = "paceline.connection"  # in the scope of a request: its connection, see `protocol`
MAX_ID = 128
_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_ID)
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")
PREFLIGHT_AGE_S = "7200"  # as long as browsers keep such an answer at most
_ALWAYS_ALLOWED = ("localhost", "127.0.0.1", "[::1]")


def new_id() -> str:
    """A request's own id; what a client sends as an id is echoed and never used."""
    return uuid.uuid4().hex


def echoed_id(headers: RawHeaders) -> bytes | None:
    """The client's request id, if it is one short word of printable ASCII."""
    found = [value for name, value in headers if name == b"x-request-id"]
    return found[0] if len(found) == 1 and _PRINTABLE.fullmatch(found[0]) else None


def speaks_anthropic(headers: RawHeaders) -> bool:
    """Whether a client of the Anthropic API asks: each of them names the version of it."""
    return any(name == b"anthropic-version" for name, _ in headers)


def text_headers(headers: RawHeaders) -> dict[str, str]:
    """The headers as text, the first of those given twice."""
    result: dict[str, str] = {}
    for name, value in headers:
        result.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return result


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The names under which this server may be addressed: a page in a browser cannot rebind another to it."""

    names: frozenset[bytes]
    takes_any: bool

    @classmethod
    def of(cls, bound: str, more: Iterable[str]) -> HostCheck:
        given = [*_ALWAYS_ALLOWED, *more]
        if bound not in ("0.0.0.0", "::", ""):
            given.append(f"[{bound}]" if ":" in bound else bound)
        # A server bound to every address has no single name; the key, which is then needed, protects it.
        takes_any = "*" in given or bound in ("0.0.0.0", "::", "")
        return cls(frozenset(name.lower().encode("ascii", "replace") for name in given), takes_any)

    def check(self, headers: RawHeaders, http_version: str) -> None:
        found = [value for name, value in headers if name == b"host"]
        if not found and http_version == "1.0":
            return
        match = _HOST.fullmatch(found[0]) if len(found) == 1 else None
        if match is None or not (self.takes_any or match.group(1).lower() in self.names):
            raise Refusal("bad_host")


@dataclass(frozen=True, slots=True)
class OriginRules:
    """The web pages whose scripts may read answers, by where they come from (CORS)."""

    names: frozenset[bytes] = frozenset()
    takes_any: bool = False

    @classmethod
    def of(cls, origins: Iterable[str]) -> OriginRules:
        given = [origin.lower().encode("ascii", "replace") for origin in origins]
        return cls(frozenset(given), b"*" in given)

    def answer_headers(self, headers: RawHeaders) -> list[tuple[bytes, bytes]]:
        """What tells a browser that the page may read the answer. Keys come in headers, so that no cookie is needed."""
        vary = [(b"vary", b"Origin")] if self.names and not self.takes_any else []
        origin = self._allowed(headers)
        if origin is None:
            return vary
        allowed = b"*" if self.takes_any else origin
        return [*vary, (b"access-control-allow-origin", allowed), (b"access-control-expose-headers", b"*")]

    def preflight_headers(self, headers: RawHeaders, methods: Iterable[str]) -> dict[str, str]:
        """What a page may send to a route that takes these methods; empty: nothing."""
        if self._allowed(headers) is None:
            return {}
        asked = [value for name, value in headers if name == b"access-control-request-headers"]
        # Repeated: "*" would not mean Authorization.
        wanted = asked[0].decode("ascii") if len(asked) == 1 and _HEADER_NAMES.fullmatch(asked[0]) else "*"
        return {
            "access-control-allow-methods": ", ".join(methods),
            "access-control-allow-headers": wanted,
            "access-control-max-age": PREFLIGHT_AGE_S,
        }

    def _allowed(self, headers: RawHeaders) -> bytes | None:
        """The origin, if one is sent and its pages may use the server."""
        found = [value for name, value in headers if name == b"origin"]
        is_allowed = len(found) == 1 and (self.takes_any or found[0].lower() in self.names)
        return found[0] if is_allowed else None


def is_preflight(method: str, headers: RawHeaders) -> bool:
    """Whether a browser asks on behalf of a page if it may send a request."""
    return method == "OPTIONS" and {b"origin", b"access-control-request-method"} <= {
        name for name, _ in headers
    }


def check_content(headers: Mapping[str, str]) -> None:
    """Refuse a body that is not plain application/json."""
    kind, _, parameters = headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise Refusal("unsupported_media_type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refusal("unsupported_media_type", "The body must not be encoded: leave Content-Encoding out.")
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip(' "').lower() not in ("utf-8", "utf8"):
            raise Refusal("invalid_encoding")


def presented_key(headers: RawHeaders) -> bytes | None:
    """The key a request brings: a bearer token, else x-api-key. None if there is none, or more than one."""
    bearers = [value for name, value in headers if name == b"authorization"]
    plain = [value for name, value in headers if name == b"x-api-key"]
    if len(bearers) > 1 or len(plain) > 1:
        return None
    if bearers:
        scheme, _, token = bearers[0].partition(b" ")
        if scheme.lower() == b"bearer" and token.strip():
            return token.strip()
    return plain[0].strip() or None if plain else None
