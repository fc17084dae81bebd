"""Links to engines elsewhere: addresses, who is let in at an engine's port, times without a common clock."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config.links import Address, CannotLink, LinkConfig, read_address
from paceline.core.events import Decision, DecisionKind, Held, Rule
from paceline.core.request import FinishReason, RequestId
from paceline.errors import ConfigError
from paceline.models.files.digest import SAMPLES, WHOLE_BYTES, model_digest
from paceline.process import far, frames
from paceline.process.channel import FrameReader, Rejects, make_header
from paceline.process.client import Explanation
from paceline.process.remote import listen
from paceline.process.remote.elsewhere import Elsewhere
from paceline.process.remote.listen import FrontPort, bind
from tests.fake_engine import finished
from tests.waiting import wait_until

LIMIT = 1 << 16
JOIN = frames.Join(far.protocol(), 0.5, 0.25, LIMIT)


def frame(payload: bytes) -> bytes:
    return make_header(payload, 1) + payload


# -- addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:7000", Address("127.0.0.1", 7000)),
        ("[::1]:7000", Address("::1", 7000)),
        ("engine-0.engines:80", Address("engine-0.engines", 80)),
        ("/run/engine.sock", Address(path="/run/engine.sock")),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, expected: Address) -> None:
    assert read_address(text, "--listen") == expected and str(expected) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":7000", "host:70000", "host:-1", "::1:7000", "host:x"]
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        read_address(text, "--listen")


def test_a_link_beyond_the_machine_needs_certificates() -> None:
    for text in ("127.0.0.1:1", "localhost:1", "[::1]:1", "/run/engine.sock"):
        LinkConfig().check(read_address(text, "--listen"), "--listen")
    for text in ("0.0.0.0:1", "10.0.0.7:1", "engines:1", "dns:engines:1"):
        with pytest.raises(CannotLink, match="--tls-cert") as raised:
            Elsewhere.read(text, LinkConfig())
        assert raised.value.exit_code == 78
    with pytest.raises(ConfigError, match="go together"):
        LinkConfig(tls_cert="a")
    with pytest.raises(CannotLink, match="cannot be used"):
        Elsewhere.read("a:1", LinkConfig(tls_cert="/none", tls_key="/none", tls_ca="/none"))


def test_lists_of_engines_are_read() -> None:
    found = Elsewhere.read("127.0.0.1:1, /a/b ,dns:localhost:3,127.0.0.1:1", LinkConfig())
    assert [str(each) for each in found.addresses] == ["127.0.0.1:1", "/a/b"]
    assert [str(each) for each in found.names] == ["localhost:3"]
    assert str(found) == "127.0.0.1:1, /a/b, dns:localhost:3"


def test_a_port_in_use_and_a_path_that_is_no_socket_are_refused(tmp_path: Path) -> None:
    with bind(Address("127.0.0.1", 0)) as bound:
        bound.listen()
        with pytest.raises(CannotLink, match="in use"):
            bind(Address("127.0.0.1", bound.getsockname()[1]))
    with bind(Address(path=str(tmp_path / "socket"))) as bound:
        bound.listen()
        with pytest.raises(CannotLink, match="in use"):
            bind(Address(path=str(tmp_path / "socket")))
    bind(Address(path=str(tmp_path / "socket"))).close()  # left behind
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CannotLink, match="not a socket"):
        bind(Address(path=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


# -- who is let in -------------------------------------------------------------------------------------------


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontPort]:
    monkeypatch.setattr(listen, "GREETING_S", 0.5)
    bound = bind(Address(path=str(tmp_path / "socket")))
    made = FrontPort(bound, None, LIMIT)
    made.open()
    yield made
    made.close()
    bound.close()


def come(port: FrontPort) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(port._bound.getsockname())
    return sock


def told(sock: socket.socket) -> list[frames.FromEngine]:
    """Until the other side closes."""
    reader, found = FrameReader(1, LIMIT, Rejects()), []
    while data := sock.recv(1 << 16):
        found += reader.feed(data)
    return [frames.decode_from_engine(each) for each in found]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", None),
        (b"PL", None),  # and nothing more
        (b"", None),
        (make_header(b"x", 1)[:-4] + (LIMIT + 1).to_bytes(4, "little"), "too large"),
        (frame(b"\xc1 no frame"), "not understood"),
        (frame(frames.encode(frames.Ping())), "not that of a server"),
        (frame(frames.encode(JOIN)) + frame(frames.encode(frames.Ping())), "not that of a server"),
        (frame(frames.encode(frames.Join("older", 0.5, 0.25, LIMIT))), "another version"),
        (frame(frames.encode(frames.Join(JOIN.protocol, -1.0, 0.25, LIMIT))), "not understood"),
    ],
)
def test_strangers_are_closed_and_counted(port: FrontPort, said: bytes, sentence: str | None) -> None:
    with come(port) as sock:
        sock.sendall(said)
        answers = told(sock)
    assert port.num_refused == 1
    if sentence is None:
        assert answers == []
    else:
        (answer,) = answers
        assert isinstance(answer, frames.LoadFailure) and sentence in answer.message
    with come(port) as sock:  # and a server is let in all the same
        sock.sendall(frame(frames.encode(JOIN)))
        front = port.next()
        assert front is not None and front.join == JOIN
        front.channel.close()


def test_many_slow_strangers_keep_nobody_out_for_long(port: FrontPort) -> None:
    slow = [come(port) for _ in range(2 * listen.MOST_GREETED)]
    wait_until(lambda: port.num_refused == len(slow), 20)
    for sock in slow:
        sock.close()
    with come(port) as sock:
        sock.sendall(frame(frames.encode(JOIN)))
        front = port.next()
        assert front is not None
        front.channel.close()


def test_one_front_at_a_time_is_let_in(port: FrontPort) -> None:
    with come(port) as first, come(port) as second:
        first.sendall(frame(frames.encode(JOIN)))
        front = port.next()
        assert front is not None
        second.sendall(frame(frames.encode(JOIN)))
        (answer,) = told(second)
        assert isinstance(answer, frames.LoadFailure) and "another server" in answer.message
        front.channel.close()
        port.release()
    with come(port) as third:
        third.sendall(frame(frames.encode(JOIN)))
        after = port.next()
        assert after is not None
        after.channel.close()


def test_who_waits_for_a_front_is_woken_at_the_end(port: FrontPort) -> None:
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(port.next()))
    waiting.start()
    port.close()
    waiting.join(20)
    assert found == [None]


# -- times and models ----------------------------------------------------------------------------------------


def test_times_cross_a_link_as_durations() -> None:
    theirs_s, ours_s, age_s = 1e6, 50.0, 2.0
    then_s = theirs_s - age_s
    decision = Decision(DecisionKind.ADMIT, RequestId(1), Rule.CHOSEN, time_s=then_s, seconds=0.25)
    update = frames.Update(
        then_s,
        endings=[finished(1, "stop", 3)._replace(time_s=then_s, queue_s=0.5)],
        held=[Held(RequestId(1), FinishReason.STOP, 3, theirs_s + 7.0)],
    )
    sent = [
        far.moved(each, -theirs_s) for each in (update, frames.Explained(1, Explanation([decision], True)))
    ]
    seen, explained = (far.moved(frames.decode_from_engine(frames.encode(each)), ours_s) for each in sent)
    assert isinstance(seen, frames.Update) and isinstance(explained, frames.Explained)
    assert seen.time_s == pytest.approx(ours_s - age_s)
    assert seen.endings[0].time_s == pytest.approx(ours_s - age_s) and seen.endings[0].queue_s == 0.5
    assert seen.held[0].until_s == pytest.approx(ours_s + 7.0)
    (known,) = explained.explanation.decisions
    assert known.time_s == pytest.approx(ours_s - age_s) and known.seconds == 0.25
    assert far.moved(frames.StillLoading(), 5.0) == frames.StillLoading()


def test_a_model_is_told_by_its_files_and_not_by_when_they_were_written(tmp_path: Path) -> None:
    weights = bytearray(4 * WHOLE_BYTES + SAMPLES)
    folders = [tmp_path / name for name in ("one", "copy", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        time.sleep(0.01)
        if folder is folders[2]:
            weights[-1] = 1
        (folder / "model.safetensors").write_bytes(weights)
    one, copy, other = map(model_digest, folders)
    assert one == copy != other
    assert model_digest(folders[0] / "model.safetensors") != one
