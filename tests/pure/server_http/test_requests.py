"""What is read of a request: hosts, keys, types, ids and routes from headers and paths, and JSON, strictly."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.access.keys_file import BadKeysFile, Key, Keyring, read_keys
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call
from paceline.server.errors import Refusal
from paceline.server.http.asgi import RouteTable
from paceline.server.http.request_headers import HostCheck, check_content, echoed_id, new_id
from paceline.server.http.strict_json import MAX_DEPTH, read_object

HASH = hashlib.sha256(b"k").hexdigest()


async def handler(call: Call) -> Answer:
    raise NotImplementedError


def route(path: str, *methods: str) -> Route:
    return Route(methods=methods, path=path, handler=handler, takes_body="POST" in methods)


@pytest.mark.parametrize(
    "bound, more, host, is_good",
    [
        ("127.0.0.1", (), b"localhost", True),
        ("127.0.0.1", (), b"LOCALHOST:8000", True),
        ("127.0.0.1", (), b"[::1]:8000", True),
        ("127.0.0.1", (), b"example.org", False),
        ("127.0.0.1", ("example.org",), b"Example.org:1", True),
        ("192.168.1.5", (), b"192.168.1.5:8000", True),
        ("192.168.1.5", (), b"192.168.1.6", False),
        ("0.0.0.0", (), b"anything.example", True),
        ("0.0.0.0", (), b"any thing", False),
        ("127.0.0.1", ("*",), b"anything.example", True),
        ("fe80::1", (), b"[fe80::1]:80", True),
        ("127.0.0.1", (), b"localhost:80:80", False),
        ("127.0.0.1", (), b"localhost\\", False),
        ("127.0.0.1", (), b"", False),
    ],
)
def test_hosts(bound: str, more: tuple[str, ...], host: bytes, is_good: bool) -> None:
    check = HostCheck.of(bound, more)
    if is_good:
        check.check([(b"host", host)], "1.1")
    else:
        with pytest.raises(Refusal):
            check.check([(b"host", host)], "1.1")


def test_only_http_1_0_may_do_without_a_host() -> None:
    check = HostCheck.of("127.0.0.1", ())
    check.check([], "1.0")
    with pytest.raises(Refusal):
        check.check([], "1.1")


def test_content_types() -> None:
    for good in ("application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'):
        check_content({"content-type": good})
    check_content({"content-type": "application/json", "content-encoding": "identity"})
    for bad in (
        {},
        {"content-type": "text/json"},
        {"content-type": "application/json", "content-encoding": "br"},
    ):
        with pytest.raises(Refusal) as refused:
            check_content(bad)
        assert refused.value.code == "unsupported_media_type"


def test_ids_are_unique_and_echoed_only_when_harmless() -> None:
    assert len({new_id() for _ in range(1000)}) == 1000
    assert echoed_id([(b"x-request-id", b"a-1")]) == b"a-1"
    for bad in (b"", b"a b", b"a\x00", b"\xff", b"a" * 129):
        assert echoed_id([(b"x-request-id", bad)]) is None
    assert echoed_id([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) is None


def test_routes_match_exactly_what_was_sent() -> None:
    table = RouteTable(
        [route("/v1/models", "GET"), route("/v1/models/{id:path}", "GET"), route("/v1/x/{a}/y", "POST")]
    )
    found = table.match(b"/v1/models/org/a%20b", "GET")
    assert found is not None
    assert (found.template, found.parameters) == ("/v1/models/{id:path}", {"id": "org/a b"})
    assert table.match(b"/v1/x/1%2F2/y", "POST") is not None
    head = table.match(b"/v1/models", "HEAD")
    assert head is not None and head.route is not None
    wrong = table.match(b"/v1/x/1/y", "GET")
    assert wrong is not None and wrong.route is None and wrong.allowed == ("POST",)
    for path in (b"/v1/models/", b"/v1/x/1/2/y", b"/v1/x//y", b"/v1/%6dodels", b"", b"/"):
        assert table.match(path, "GET") is None, path


# ---------------------------------------------------------------- keys


def bearer(key: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key)]


def test_a_keyring_knows_its_keys() -> None:
    ring = Keyring(
        [Key(tenant=name, sha256=hashlib.sha256(name.encode()).digest(), max_concurrency=3) for name in "abc"]
    )
    assert ring.admit(bearer(b"b")).tenant == "b"
    assert ring.admit([(b"x-api-key", b"c")]).max_concurrency == 3
    for headers in ([], bearer(b"d"), bearer(b""), bearer("é".encode("latin-1")), [(b"authorization", b"b")]):
        with pytest.raises(Refusal) as refused:
            ring.admit(headers)
        assert refused.value.code == "invalid_api_key"
    assert Keyring([]).admit([]).tenant == "default"


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        f'# keys\n{{"name": "a", "sha256": "{HASH}", "weight": 2, "class": "spot"}}\n\n',
        f'[{{"name": "a", "sha256": "{HASH}"}}]',
        f"- name: a\n  sha256: {HASH}\n  max_concurrency: 4\n",
        f"keys:\n- name: a\n  sha256: {HASH}\n",
    ],
)
def test_keys_files_are_json_lines_or_yaml(tmp_path: Path, text: str) -> None:
    ring = read_keys(written(tmp_path / "keys", text), {})
    assert ring.admit(bearer(b"k")).tenant == "a"


def test_the_environment_brings_one_key() -> None:
    ring = read_keys(None, {"PACELINE_API_KEY": "k"})
    assert ring.admit(bearer(b"k")).tenant == "default"
    assert len(read_keys(None, {})) == 0


def test_which_callers_are_admin(tmp_path: Path) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    path = written(
        tmp_path / "keys",
        f'{{"name": "a", "sha256": "{HASH}"}}\n{{"name": "b", "sha256": "{other}", "admin": true}}',
    )
    ring = read_keys(path, {"PACELINE_ADMIN_KEY": "third"})
    admins = {key: ring.admit(bearer(key)).is_admin for key in (b"k", b"other", b"third")}
    assert admins == {b"k": False, b"other": True, b"third": True}
    assert read_keys(None, {}).admit([]).is_admin  # only this machine gets here without keys


@pytest.mark.parametrize(
    "text, part",
    [
        ("", "holds no key"),
        ('{"name": "a"}', "sha256 must be"),
        (f'{{"sha256": "{HASH}"}}', "name must be"),
        (f'{{"name": "a b", "sha256": "{HASH}"}}', "name must be"),
        ('{"name": "a", "sha256": "k"}', "entry 1"),
        (f'{{"name": "a", "sha256": "{HASH}", "limit": 1}}', "'limit'"),
        (f'{{"name": "a", "sha256": "{HASH}", "weight": 0}}', "weight must be"),
        (f'{{"name": "a", "sha256": "{HASH}", "admin": "yes"}}', "admin must be true or false"),
        (f'{{"name": "a", "sha256": "{HASH}", "max_concurrency": true}}', "max_concurrency must be"),
        (f'{{"name": "a", "sha256": "{HASH}"}}\n{{"name": "b", "sha256": "{HASH}"}}', "same sha256"),
        ("{broken", "not JSON"),
        ("a: [", "neither JSON lines nor YAML"),
        ("5", "list of keys"),
    ],
)
def test_mistakes_in_a_keys_file_are_named(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(BadKeysFile, match=part) as failed:
        read_keys(written(tmp_path / "keys", text), {})
    assert "--api-keys-file" in str(failed.value)
    assert HASH not in str(failed.value)


def test_a_keys_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", f'{{"name": "a", "sha256": "{HASH}"}}', 0o644)
    with pytest.raises(BadKeysFile, match="chmod 600"):
        read_keys(path, {})
    with pytest.raises(BadKeysFile, match="cannot be read"):
        read_keys(str(tmp_path / "nothing"), {})


# ----------------------------------------------------------------
# Bodies are read strictly: what is good is what `json` reads, what is bad is refused with its code.


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=20), inner), max_leaves=20
)


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=20), values, max_size=10), st.booleans())
def test_good_objects_come_back(body: dict[str, Any], ensure_ascii: bool) -> None:
    assert read_object(json.dumps(body, ensure_ascii=ensure_ascii).encode()) == body


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(Refusal):
        assert isinstance(read_object(data), dict)


@given(st.integers(1, 80), st.sampled_from(["[]", "{}", "mixed"]), st.text(alphabet='[{"\\', max_size=5))
def test_depth_counts_brackets_outside_of_strings(depth: int, kind: str, noise: str) -> None:
    value: Any = noise
    for level in range(depth - 1):
        value = (
            {"a": value, "b": noise} if kind == "{}" or (kind == "mixed" and level % 2) else [noise, value]
        )
    data = json.dumps({"a": value}).encode()
    if depth <= MAX_DEPTH:
        assert read_object(data) == {"a": value}
    else:
        with pytest.raises(Refusal) as refused:
            read_object(data)
        assert refused.value.code == "too_deep"


def test_long_strings_of_escapes_are_read_in_linear_time() -> None:
    text = '\\"' * 400_000
    data = json.dumps({"a": text, "b": [[]] * 40}).encode()
    assert read_object(data)["a"] == text
    with pytest.raises(Refusal):
        read_object(data[: len(data) // 2])


def test_surrogate_pairs_are_whole_or_refused() -> None:
    assert read_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    for bad in (b'{"a": "\\ude00\\ud83d"}', b'{"a": ["\\ud83d"]}', b'{"a": {"\\uDfff": 1}}'):
        with pytest.raises(Refusal) as refused:
            read_object(bad)
        assert refused.value.code == "invalid_unicode"
