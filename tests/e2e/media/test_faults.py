"""Pictures when something goes wrong around them: clients that leave, threads that are full, an engine that dies, and
pools that hold one item. A canary follows each."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.client_server import KEY, PATIENCE_S
from tests.e2e.http_server import read_reply, request_bytes
from tests.e2e.media.picture_server import (
    CHAT,
    PART,
    TEXT,
    Hosts,
    PictureServer,
    chat,
    inline,
    link,
    text_of,
)
from tests.pictures import encoded, picture
from tests.vision_folder import write_tile_model


def begin(server: PictureServer, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read yet."""
    client = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
    client.sendall(
        request_bytes("POST", CHAT, json.dumps(body).encode(), headers=(f"Authorization: Bearer {KEY}",))
    )
    return client


def seen_once(count: int, first: int) -> list[dict[str, Any]]:
    """So many pictures that no other test has."""
    return [inline(encoded(picture(128, 96, seed=first + index))) for index in range(count)]


def low(part: dict[str, Any]) -> dict[str, Any]:
    """A picture of one tile."""
    return {"type": "image_url", "image_url": {**part["image_url"], "detail": "low"}}


def wait_for_encoding(server: PictureServer, positions: float) -> None:
    server.wait_until(lambda: server.metric("encode_positions_total") > positions)


def test_clients_that_leave_while_pixels_are_decoded(server: PictureServer) -> None:
    data = encoded(picture(2500, 2500), "JPEG")
    for number in range(8):
        body = chat(*[inline(data + bytes(number), "jpeg")] * 2, TEXT)
        begin(server, body).close()
    server.wait_until(server.is_idle)


def test_clients_that_leave_while_a_group_is_under_way(server: PictureServer, wanted: str) -> None:
    """Another request has some of the same pictures: for it the group goes on."""
    for round_ in range(3):
        pictures = seen_once(12, 100 * round_)
        before = server.metric("encode_positions_total")
        leaving = [begin(server, chat(*pictures, TEXT, max_tokens=50)) for _ in range(2)]
        with ThreadPoolExecutor(1) as pool:
            staying = pool.submit(server.ask_chat, *pictures[6:], TEXT)
            wait_for_encoding(server, before)
            for client in leaving:
                client.close()
            alone = text_of(staying.result())
        server.wait_until(server.is_idle)
        assert text_of(server.ask_chat(*pictures[6:], TEXT)) == alone


def test_no_more_pictures_wait_for_threads_than_there_is_room_for(server: PictureServer, wanted: str) -> None:
    """Others are told to come again; requests without pictures are served as ever."""
    blank = encoded(Image.new("RGB", (3000, 3000)))
    bodies = [chat(low(inline(blank + bytes(number))), TEXT, max_tokens=1) for number in range(150)]
    clients = [begin(server, body) for body in bodies]
    assert server.ask_chat(TEXT, max_tokens=1).status == 200
    assert server.ask("GET", "/health").status == 200
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(read_reply, clients))
    for client in clients:
        client.close()
    found = Counter((reply.status, reply.code if reply.status >= 400 else "") for reply in replies)
    assert set(found) == {(200, ""), (429, "queue_full")}, found
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status == 429)


def test_an_engine_that_dies_with_pictures_held(server: PictureServer, wanted: str) -> None:
    """Each waiter is told, and the next engine sees as the first did."""
    bodies = [chat(*seen_once(8, 1_000 + 10 * number), TEXT, max_tokens=50) for number in range(6)]
    before = server.metric("encode_positions_total")
    clients = [begin(server, body) for body in bodies]
    engine = server.engine
    wait_for_encoding(server, before)
    os.kill(engine, signal.SIGKILL)
    replies = [read_reply(client) for client in clients]
    for client in clients:
        client.close()
    assert {reply.status for reply in replies} <= {200, 500, 503}, replies
    assert any(reply.status != 200 for reply in replies)
    server.wait_until(lambda: server.ask("GET", "/health").status == 200)
    assert server.engine != engine
    again = server.ask("POST", CHAT, bodies[0])
    assert again.status == 200, again.body


# ---------------------------------------------------------------- small pools


def test_a_pool_that_holds_one_picture_serves_many(
    tmp_path: Path, hosts: Hosts, server: PictureServer
) -> None:
    """A page: the pictures of a request, and of several at once, are encoded one after the other."""
    bodies = [chat(*seen_once(6, 2_000 + shift), TEXT) for shift in (0, 3, 6, 50)]
    wanted = [text_of(server.ask("POST", CHAT, body)) for body in bodies]
    small = PictureServer(tmp_path, hosts, "--encoder-cache-tokens", "64")
    try:
        small.wait_for(200)
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda body: small.ask("POST", CHAT, body), bodies * 2))
        assert [text_of(reply) for reply in replies] == wanted * 2
        small.wait_until(small.is_idle)
    finally:
        small.close()


class WideServer(PictureServer):
    """One whose pictures have more vectors than its pool, and that fetches no links."""

    def _model_flags(self) -> list[str]:
        model, *flags = super()._model_flags()
        write_tile_model(Path(model), scale_factor=1, vision_config=FINE)
        processor = {"processor_class": "Idefics3Processor", "image_seq_len": 256}
        (Path(model) / "processor_config.json").write_text(json.dumps(processor))
        at = flags.index("--allowed-media-domains")
        return [model, *flags[:at], *flags[at + 2 :], "--encoder-cache-tokens", "100"]


FINE = {
    "model_type": "idefics3_vision",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 2,
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, hosts: Hosts) -> Iterator[WideServer]:
    running = WideServer(tmp_path_factory.mktemp("wide"), hosts)
    try:
        running.wait_for(200)
        yield running
    finally:
        running.close()


REFUSED = {
    "larger than the pool": (
        low(PART),
        "context_length_exceeded",
        "has 256 tokens, and there is room for the vectors of 128",
    ),
    "a link": (link("http://pics.example/picture.png"), "media_not_allowed", "this server fetches no links"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_this_server_has_no_room_or_no_leave_for(wide: WideServer, hosts: Hosts, name: str) -> None:
    part, code, words = REFUSED[name]
    song, heard = text_of(wide.ask_chat(TEXT)), len(hosts.heard)
    reply = wide.ask_chat(TEXT, part)
    assert (reply.status, reply.code) == (400, code), reply.body
    message = reply.json["error"]["message"]
    assert words in message and "messages[0].content[1]" in message
    assert text_of(wide.ask_chat(TEXT)) == song and len(hosts.heard) == heard
