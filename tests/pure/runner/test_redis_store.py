"""A store that servers share: what one writes the others find, and no wrong byte is ever called right."""

from __future__ import annotations

import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config.engine import ModelConfig
from paceline.core.shared_files import read_key
from paceline.core.store import ANYWHERE, BlockHead
from paceline.errors import ConfigError
from paceline.runner.stores.redis_store import KEPT_S, NEWS, RedisStore, connect
from tests.shared_store import Client, fake_server

PLACE = 4096
KEY = bytes(range(32))
PASSWORD = "hunter2"


@pytest.fixture
def server() -> Any:
    return fake_server()


def open_store(
    server: Any, *, key: bytes = KEY, fingerprint: bytes = b"weights", place: int = PLACE
) -> RedisStore:
    return RedisStore(Client(server), key, place_bytes=place, fingerprint=fingerprint)


def head_of(number: int) -> BlockHead:
    return BlockHead(number.to_bytes(32, "big"), number.to_bytes(16, "big"), number)


def block_of(number: int) -> bytes:
    return random.Random(number).randbytes(PLACE)


def fill(store: RedisStore, numbers: range) -> None:
    for number in numbers:
        data = memoryview(block_of(number))
        store.write(number, head_of(number), [data[:100], data[100:]])


def read(store: RedisStore, head: BlockHead) -> bytes | None:
    into = memoryview(bytearray(PLACE))
    return bytes(into) if store.read(0, head, [into[:100], into[100:]]) else None


def seen(store: RedisStore) -> list[int]:
    entries = list(store.entries())
    assert {place for place, _ in entries} <= {ANYWHERE}
    assert [head for _, head in entries] == [head_of(head.uses) for _, head in entries]
    return [head.uses for _, head in entries]


def test_what_one_server_writes_the_others_learn_of_once(server: Any) -> None:
    first, second = open_store(server), open_store(server)
    fill(first, range(3))
    assert seen(second) == [0, 1, 2] and seen(first) == []  # it knows what it wrote
    fill(second, range(3, 5))
    assert seen(first) == [3, 4] and seen(second) == []
    assert [read(second, head_of(number)) for number in range(5)] == [block_of(number) for number in range(5)]
    assert read(first, head_of(9)) is None
    restarted = open_store(server)
    assert seen(restarted) == list(range(5)) and read(restarted, head_of(2)) == block_of(2)


def test_a_long_stream_is_read_whole(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runner.stores.redis_store.TOGETHER", 4)
    fill(open_store(server), range(11))
    assert seen(open_store(server)) == list(range(11))


def test_what_is_not_used_for_a_day_goes_and_is_not_offered(server: Any) -> None:
    store, client = open_store(server), Client(server).real
    fill(store, range(3))
    names = client.keys("*")
    assert len(names) == 4  # the stream too; the probe is gone
    assert all(0 < client.ttl(name) <= KEPT_S for name in names)
    client.expire(store._name(head_of(1)), 100)
    assert read(store, head_of(1)) is not None
    assert client.ttl(store._name(head_of(1))) > 100
    client.delete(store._name(head_of(2)))
    assert seen(open_store(server)) == [0, 1] and read(store, head_of(2)) is None


@pytest.mark.parametrize("changes", [{"key": bytes(32)}, {"fingerprint": b"other weights"}])
def test_another_key_and_other_weights_find_nothing(server: Any, changes: dict[str, Any]) -> None:
    first, other = open_store(server), open_store(server, **changes)
    fill(first, range(3))
    assert seen(other) == [] and read(other, head_of(1)) is None
    # Not even where the values stand under the other's names.
    client = Client(server).real
    client.set(other._name(head_of(1)), client.get(first._name(head_of(1))))
    assert read(other, head_of(1)) is None


def flipped(value: bytes) -> bytes:
    text = bytearray(value)
    text[random.Random(len(value)).randrange(len(text))] ^= 1
    return bytes(text)


LIES: dict[str, Callable[[bytes], Any]] = {
    "nothing": lambda value: None,
    "empty": lambda value: b"",
    "short": lambda value: value[:-1],
    "long": lambda value: value + b"\0",
    "far too long": lambda value: 1000 * value,
    "a flipped bit": flipped,
    "no magic": lambda value: b"xxxx" + value[4:],
    "no digest": lambda value: value[:4] + bytes(32) + value[36:],
    "invented": lambda value: random.Random(3).randbytes(len(value)),
    "text": lambda value: "text",
    "a number": lambda value: 7,
    "a list": lambda value: [value],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_a_miss_and_touches_nothing(server: Any, lie: str) -> None:
    store = open_store(server)
    fill(store, range(2))
    store._client.lie = lambda name, value: LIES[lie](value)
    into = memoryview(bytearray(PLACE))
    assert not store.read(0, head_of(1), [into])
    assert bytes(into) == bytes(PLACE)


def test_swapped_values_and_another_check_are_misses(server: Any) -> None:
    store, client = open_store(server), Client(server).real
    fill(store, range(2))
    one, two = (store._name(head_of(number)) for number in range(2))
    values = client.get(one), client.get(two)
    client.set(one, values[1])
    client.set(two, values[0])
    assert read(store, head_of(0)) is None and read(store, head_of(1)) is None
    client.set(one, values[0])
    assert read(store, head_of(0)) == block_of(0)
    assert read(store, head_of(0)._replace(check=bytes(15) + b"x")) is None


def test_a_stream_of_nonsense_is_passed_over_and_one_without_end_left(server: Any) -> None:
    store, client = open_store(server), Client(server).real
    fill(open_store(server), range(2))
    for fields in ({b"b": b"short"}, {b"x": bytes(NEWS.size)}, {b"b": NEWS.size * b"x"}):
        client.xadd(store._stream, fields)  # the last names a block that is not there
    assert seen(store) == [0, 1]
    store.num_places = 5
    again = [(b"1-1", {b"b": NEWS.size * b"x"})] * 1024
    store._client.xrange = lambda *given, **more: again
    assert list(store.entries()) == []
    store._client.xrange = lambda *given, **more: [7]
    with pytest.raises(OSError):
        list(store.entries())


def test_a_store_that_is_gone_or_full_raises_os_errors(server: Any) -> None:
    from redis.exceptions import OutOfMemoryError

    store = open_store(server)
    fill(store, range(1))
    server.connected = False
    with pytest.raises(OSError):
        read(store, head_of(0))
    with pytest.raises(OSError):
        fill(store, range(1, 2))
    with pytest.raises(OSError):
        list(store.entries())
    with pytest.raises(OSError):
        open_store(server)
    server.connected = True

    class Full:
        def __getattr__(self, name: str) -> Any:
            return lambda *given, **more: [OutOfMemoryError("maxmemory is reached")]

    store._client.pipeline = lambda **more: Full()
    with pytest.raises(OSError, match="^maxmemory is reached$"):
        fill(store, range(2, 3))


class Bounded(Client):
    """A redis that says how much it keeps."""

    def __init__(self, server: Any, maxmemory: int, policy: str) -> None:
        super().__init__(server)
        self.info = lambda section: {"maxmemory": maxmemory, "maxmemory_policy": policy}


def test_as_many_places_as_redis_keeps_and_a_word_where_it_grows_or_refuses(server: Any) -> None:
    def opened(maxmemory: int, policy: str) -> RedisStore:
        client = Bounded(server, maxmemory, policy)
        return RedisStore(client, KEY, place_bytes=PLACE, fingerprint=b"weights")

    assert opened(100 * PLACE, "allkeys-lru").num_places == 100
    assert opened(100 * PLACE, "allkeys-lru").notices == ()
    assert "allkeys-lru" in opened(100 * PLACE, "noeviction").notices[0]
    assert "no maxmemory" in opened(0, "noeviction").notices[0]
    with pytest.raises(ConfigError, match="holds no block"):
        opened(100, "allkeys-lru")


def test_what_redis_refuses_at_the_start_is_a_config_error(server: Any) -> None:
    from redis.exceptions import AuthenticationError

    def refuse() -> None:
        raise AuthenticationError("invalid username-password pair")

    client: Any = Client(server)
    client.ping = refuse
    with pytest.raises(ConfigError, match="refuses it: invalid username-password pair"):
        RedisStore(client, KEY, place_bytes=PLACE, fingerprint=b"weights")


@pytest.mark.parametrize("url", ["http://a", f"redis//:{PASSWORD}@a", f"redis://:{PASSWORD}@a:x/0", "redis"])
def test_a_url_that_is_none_is_refused_and_not_repeated(server: Any, url: str) -> None:
    with pytest.raises(ConfigError, match="must be redis://HOST:PORT/DB") as caught:
        connect(url)
    assert PASSWORD not in str(caught.value) and caught.value.__cause__ is None


def test_a_store_that_cannot_be_reached_is_told_apart_without_its_password(
    server: Any, tmp_path: Path
) -> None:
    url = f"redis://user:{PASSWORD}@127.0.0.1:1/0"
    with pytest.raises(OSError) as caught:
        RedisStore.open(url, tmp_path / "key", place_bytes=PLACE, fingerprint=b"")
    assert PASSWORD not in str(caught.value) and "127.0.0.1" in str(caught.value)


def test_a_key_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = read_key(path)
    assert key is not None and len(key) == 32 and read_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["key"]
    path.write_bytes(b"short")
    assert read_key(path) is None


@pytest.mark.parametrize("name", ["folder", "short", "missing/key"])
def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(ConfigError, match="--kv-store-key .* (must hold 32 bytes|cannot be read or made)"):
        RedisStore.open("redis://a", tmp_path / name, place_bytes=PLACE, fingerprint=b"")


STORE = {"kv_store": "redis://a", "kv_store_key": "key"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**STORE, "kv_disk_dir": "kv"}, "are the same level: give one"),
        ({**STORE, "kv_disk_size": 1 << 30}, "the size of --kv-store is the maxmemory"),
        ({"kv_store": "redis://a"}, "go together"),
        ({"kv_store_key": "key"}, "go together"),
        ({"kv_disk_write_rate": 1}, "needs --kv-disk-dir or --kv-store"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**given)
