"""Blocks in a store that speaks the redis protocol, for servers that share prefixes.

    paceline:kv:NAME:KEY   a block: magic, a keyed digest of head and bytes, bytes
    paceline:kv:NAME       a stream of the heads in the order they were written: servers learn from it what others wrote

NAME stands for what computes, with which weights, and for the key file that the servers share; without that key neither
a name nor a value can be made up. So what is cut short, swapped, invented or of other weights is a miss. Places are the
server's own numbers for what it knows of. How much is kept is left to redis (`maxmemory`); what was not used for a day
goes. Knows nothing of tickets or threads but that several call it. Decision: docs/decisions/0047-the-disk.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.shared_files import KEY_BYTES, read_key
from paceline.core.store import ANYWHERE, BlockHead
from paceline.errors import ConfigError

MAGIC = b"pkv1"
DIGEST_BYTES = 32
NEWS = struct.Struct("<32s16sI8s")  # of the stream: key, check, uses, who wrote it
FIELD = b"b"
TIMEOUT_S = 2.0  # of a connection and of each read and write of it
KEPT_S = 24 * 3600
DEFAULT_BYTES = 16 << 30  # that a store without a bound of its own is expected to keep
MOST_PLACES = 1 << 16  # what is known of each takes memory, and time at the start
TOGETHER = 1024  # entries asked for at once
MOST_USES = 0xFFFF_FFFF
PROBES = 4


class RedisStore:
    """The blocks of one kind of server in a store that others use too."""

    flag = "--kv-store"
    is_shared = True

    def __init__(self, client: Any, key: bytes, *, place_bytes: int, fingerprint: bytes) -> None:
        """`client`: of redis-py. `fingerprint`: of everything but the tokens that bytes depend on.

        Raises ConfigError where it cannot be used as it is, OSError where it cannot be reached.
        """
        self._client, self.key, self._place_bytes = client, key, place_bytes
        name = hashlib.blake2b(fingerprint, key=key, digest_size=16).hexdigest()
        self._stream = f"paceline:kv:{name}".encode()
        self._writer = os.urandom(8)
        self._last = b"-"  # entry of the stream that was seen
        bound, policy = self._limits()
        self.num_places = min((bound or DEFAULT_BYTES) // place_bytes, MOST_PLACES)
        if self.num_places < 1:
            raise ConfigError(
                f"--kv-store: its maxmemory of {bound} bytes holds no block of {place_bytes}: give it a hundred times "
                "that"
            )
        self.notices: tuple[str, ...] = ()
        if not bound:
            self.notices = ("--kv-store: redis has no maxmemory: it may grow for a day",)
        elif policy == "noeviction":
            self.notices = (
                "--kv-store: redis refuses writes once it is full; set maxmemory-policy allkeys-lru",
            )
        self._rates = self._measure()

    @classmethod
    def open(cls, url: str, key_file: Path, *, place_bytes: int, fingerprint: bytes) -> RedisStore:
        """Raises as the class does; no message has the URL, which may have a password."""
        try:
            key = read_key(key_file)
        except OSError as error:
            raise ConfigError(
                f"--kv-store-key {key_file}: cannot be read or made: {error.strerror}"
            ) from error
        if key is None:
            raise ConfigError(
                f"--kv-store-key {key_file}: must hold {KEY_BYTES} bytes; a file that is not there is made"
            )
        return cls(connect(url), key, place_bytes=place_bytes, fingerprint=fingerprint)

    # -- the store seam --------------------------------------------------------------------------------------

    def write(self, place: int, head: BlockHead, parts: Sequence[memoryview]) -> None:
        news = NEWS.pack(head.key, head.check, max(0, min(head.uses, MOST_USES)), self._writer)
        with _as_os_errors():
            orders = self._client.pipeline(transaction=False)
            orders.set(self._name(head), b"".join((MAGIC, self._digest(head, parts), *parts)), ex=KEPT_S)
            orders.xadd(self._stream, {FIELD: news}, maxlen=self.num_places, approximate=True)
            orders.expire(self._stream, KEPT_S)
            for answer in orders.execute(raise_on_error=False):  # else the message would have the bytes
                if isinstance(answer, Exception):
                    raise answer

    def read(self, place: int, head: BlockHead, into: Sequence[memoryview]) -> bool:
        with _as_os_errors():
            value = self._client.getex(self._name(head), ex=KEPT_S)
        start = len(MAGIC) + DIGEST_BYTES
        wanted = start + sum(part.nbytes for part in into)
        if not isinstance(value, bytes) or len(value) != wanted or not value.startswith(MAGIC):
            return False
        body = memoryview(value)[start:]
        if not hmac.compare_digest(self._digest(head, [body]), value[len(MAGIC) : start]):
            return False
        at = 0
        for part in into:
            part[:] = body[at : at + part.nbytes]
            at += part.nbytes
        return True

    def entries(self) -> Iterator[tuple[int, BlockHead]]:
        for _ in range(self.num_places // TOGETHER + 1):  # a stream that never ends is not believed
            with _as_os_errors():
                found = self._client.xrange(self._stream, min=self._last, count=TOGETHER)
                if not isinstance(found, list) or not found:
                    return
                self._last = b"(" + found[-1][0]
                heads = [head for _, fields in found if (head := self._read_news(fields)) is not None]
                there = self._client.pipeline(transaction=False)
                for head in heads:
                    there.exists(self._name(head))
                is_there = there.execute() if heads else []
            for head, is_kept in zip(heads, is_there, strict=False):
                if is_kept:
                    yield ANYWHERE, head
            if len(found) < TOGETHER:
                return

    # -- outside the seam ------------------------------------------------------------------------------------

    def measure(self) -> tuple[float, float]:
        """Bytes a second that could be written and read when it was opened."""
        return self._rates

    def save_tables(self, tables: Sequence[Sequence[float]]) -> None:
        """What one server has learned is not for the others."""

    def load_tables(self) -> tuple[tuple[float, ...], ...]:
        return ()

    def close(self) -> None:
        self._client.close()

    def _limits(self) -> tuple[int, str]:
        """Bytes it keeps, 0 for no bound, and what it does when it is full."""
        with _as_os_errors(while_opening=True):
            self._client.ping()
            try:
                known = self._client.info("memory")
            except Exception as error:
                if _is_refused(error):  # as a provider may
                    return 0, ""
                raise
        return int(known.get("maxmemory", 0)), str(known.get("maxmemory_policy", ""))

    def _measure(self) -> tuple[float, float]:
        head = BlockHead(b"probe" + self._writer, b"")
        data = memoryview(os.urandom(self._place_bytes))
        name, rates = self._name(head), []
        orders: tuple[Callable[[], Any], ...] = (
            lambda: self._client.set(name, data, ex=60),
            lambda: self._client.get(name),
        )
        with _as_os_errors(while_opening=True):
            for order in orders:
                started_s = time.perf_counter()
                for _ in range(PROBES):
                    order()
                rates.append(PROBES * len(data) / max(time.perf_counter() - started_s, 1e-9))
            self._client.delete(name)
        return rates[0], rates[1]

    def _name(self, head: BlockHead) -> bytes:
        return self._stream + b":" + head.key

    def _digest(self, head: BlockHead, parts: Sequence[memoryview]) -> bytes:
        digest = hashlib.blake2b(self._name(head) + head.check, key=self.key, digest_size=DIGEST_BYTES)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _read_news(self, fields: Any) -> BlockHead | None:
        news = fields.get(FIELD) if isinstance(fields, dict) else None
        if not isinstance(news, bytes) or len(news) != NEWS.size:
            return None
        key, check, uses, writer = NEWS.unpack(news)
        return None if writer == self._writer else BlockHead(key, check, uses)


def connect(url: str) -> Any:
    """A client; nothing is sent yet. Nothing is tried twice: a thread waits for each try."""
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ConfigError(
            "--kv-store needs redis, which is not installed: pip install 'paceline[redis]'"
        ) from None
    try:
        return Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:
        raise ConfigError(
            "--kv-store must be redis://HOST:PORT/DB, or rediss:// for TLS, with USER:PASSWORD@ before the host where "
            "it asks for them"
        ) from None


def _is_refused(error: Exception) -> bool:
    """The store has answered, and does not do it."""
    from redis.exceptions import AuthenticationError, ResponseError

    return isinstance(error, AuthenticationError | ResponseError)


@contextmanager
def _as_os_errors(*, while_opening: bool = False) -> Iterator[None]:
    """Errors of redis-py, and whatever answers that make no sense lead to, as those of the seam. What is refused at the
    start stays refused."""
    try:
        yield
    except Exception as error:
        if while_opening and _is_refused(error):
            raise ConfigError(f"--kv-store: redis refuses it: {error}") from None
        raise OSError(str(error) or type(error).__name__) from None
