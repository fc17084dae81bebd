"""Links to pictures, with a resolver and a listener of the test: what is fetched, and where nothing is ever sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.media.picture_server import (
    MESSAGES,
    MODEL,
    MOST_PICTURES,
    NUM_TOKENS,
    PUBLIC,
    RESPONSES,
    TEXT,
    Hosts,
    PictureServer,
    chat,
    link,
    text_of,
)

PICTURE = "http://pics.example/picture.png"
NOT_ALLOWED, FAILED = "media_not_allowed", "media_fetch_failed"
NOT_LISTED, NOT_PUBLIC = "allowed-media-domains", "not one of the public internet"


def test_every_api_follows_links(server: PictureServer, hosts: Hosts, wanted: str) -> None:
    assert text_of(server.ask_chat(link(PICTURE), TEXT)) == wanted
    assert text_of(server.ask_chat(link("https://Pics.Example./redirected"), TEXT)) == wanted
    block = {"type": "image", "source": {"type": "url", "url": PICTURE}}
    assert server.ask("POST", MESSAGES, chat(block, TEXT)).json["content"][0]["text"] == wanted
    parts = [{"type": "input_image", "image_url": PICTURE}, {"type": "input_text", "text": TEXT["text"]}]
    body = {"model": MODEL, "input": [{"role": "user", "content": parts}], "temperature": 0}
    answered = server.ask("POST", RESPONSES, {**body, "max_output_tokens": NUM_TOKENS})
    assert answered.json["output"][0]["content"][0]["text"] == wanted
    assert hosts.lines("dialled")[-1] == f"{PUBLIC} pics.example:80"
    assert [each for each in hosts.heard if "/" in each][-1] == "pics.example/picture.png"


def test_as_many_links_as_a_request_may_have(server: PictureServer, hosts: Hosts) -> None:
    before = len(hosts.heard)
    detail = {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}
    reply = server.ask_chat(*[detail] * MOST_PICTURES, TEXT, max_tokens=1)
    assert reply.status == 200, reply.body
    assert len(hosts.heard) - before == 2 * MOST_PICTURES


# Of each link: the code, words of the message, and how many connections are made.
REFUSED: dict[str, tuple[str, str, str, int]] = {
    "a host that is not listed": ("http://other.example/picture.png", NOT_ALLOWED, NOT_LISTED, 0),
    "one that ends like a listed one": ("http://a.pics.example/picture.png", NOT_ALLOWED, NOT_LISTED, 0),
    "an address": ("http://127.0.0.1/picture.png", NOT_ALLOWED, NOT_LISTED, 0),
    "an address as a number": ("http://2130706433/picture.png", NOT_ALLOWED, NOT_LISTED, 0),
    "this machine": ("http://localhost/picture.png", NOT_ALLOWED, NOT_PUBLIC, 0),
    "a private network": ("http://private.example/picture.png", NOT_ALLOWED, NOT_PUBLIC, 0),
    "loopback": ("http://loopback.example/picture.png", NOT_ALLOWED, NOT_PUBLIC, 0),
    "link-local": ("http://local.example/latest/meta-data", NOT_ALLOWED, NOT_PUBLIC, 0),
    "an address within an address": ("http://inner.example/picture.png", NOT_ALLOWED, NOT_PUBLIC, 0),
    "one address of two": ("http://mixed.example/picture.png", NOT_ALLOWED, NOT_PUBLIC, 0),
    "a name that turns": ("http://rebinding.example/turned", NOT_ALLOWED, NOT_PUBLIC, 1),
    "a redirect inwards": ("http://pics.example/inwards", NOT_ALLOWED, NOT_PUBLIC, 1),
    "a redirect elsewhere": ("http://pics.example/elsewhere", NOT_ALLOWED, NOT_LISTED, 1),
    "a redirect to a file": ("http://pics.example/scheme", NOT_ALLOWED, "http or https", 1),
    "redirects without end": ("http://pics.example/again", FAILED, "5 s", 4),
    "another port": ("http://pics.example:8080/picture.png", NOT_ALLOWED, "ports 80 and 443", 0),
    "a user": ("http://me@pics.example/picture.png", NOT_ALLOWED, "user names", 0),
    "another scheme": ("ftp://pics.example/picture.png", NOT_ALLOWED, "must begin with", 0),
    "a file": ("file:///etc/passwd", NOT_ALLOWED, "must begin with", 0),
    "a name without address": ("http://no-such-host.invalid/picture.png", FAILED, "5 s", 0),
    "nothing there": ("http://pics.example/none", FAILED, "5 s", 1),
    "no picture": ("http://pics.example/page", "invalid_image", "no known format", 1),
    "one that is too large": ("http://pics.example/large", FAILED, "20000000 bytes", 1),
    "one without end": ("http://pics.example/endless", FAILED, "20000000 bytes", 1),
    "one that drips": ("http://pics.example/drip", FAILED, "5 s", 1),
    "one that never comes": ("http://pics.example/silent", FAILED, "5 s", 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_not_connected_to(server: PictureServer, hosts: Hosts, name: str) -> None:
    url, code, words, connections = REFUSED[name]
    dialled, heard = len(hosts.lines("dialled")), hosts.heard.count("a connection")
    reply = server.ask_chat(TEXT, link(url))
    assert (reply.status, reply.code) == (400, code), reply.body
    message = reply.json["error"]["message"]
    assert words in message and "messages[0].content[1]" in message and "secret" not in message
    assert len(hosts.lines("dialled")) - dialled == connections
    assert hosts.heard.count("a connection") - heard == connections
    assert all(line.startswith(f"{PUBLIC} ") for line in hosts.lines("dialled"))


def test_links_in_text_are_text(server: PictureServer, hosts: Hosts) -> None:
    before = len(hosts.heard), len(hosts.lines("asked"))
    text = {"type": "text", "text": f"see ![a]({PICTURE}) <img src='{PICTURE}'> {PICTURE}"}
    assert server.ask_chat(text).status == 200
    assert (len(hosts.heard), len(hosts.lines("asked"))) == before


def test_a_slow_host_keeps_nobody_waiting(server: PictureServer, hosts: Hosts, wanted: str) -> None:
    """As many downloads as there may be drip along; pictures that came with their request are seen meanwhile."""
    dialled = len(hosts.lines("dialled"))
    slow: list[Any] = [link("http://pics.example/drip")] * 8
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(server.ask_chat, *slow, TEXT) for _ in range(4)]
        server.wait_until(lambda: len(hosts.lines("dialled")) - dialled == 32)
        assert server.sing() == wanted
        more = server.ask_chat(link(PICTURE), TEXT)
        assert (more.status, more.json["error"]["type"]) == (429, "rate_limit_error"), more.body
        assert int(more.headers["retry-after"]) >= 1
        assert {each.result().code for each in waiting} == {FAILED}
    assert text_of(server.ask_chat(link(PICTURE), TEXT)) == wanted
