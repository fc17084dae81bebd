"""A server whose model sees pictures, requests to it, and the hosts of its internet."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.e2e.client_server import ClientServer, keys_file
from tests.e2e.http_server import Reply
from tests.pictures import encoded, picture
from tests.vision_folder import write_tile_model

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MODEL = "sees"
NUM_TOKENS = 6
MOST_PICTURES = 48
DATA = encoded(picture(64, 32))
BASE64 = base64.b64encode(DATA).decode()
TEXT = {"type": "text", "text": "What is it?"}


def link(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def inline(data: bytes, kind: str = "png") -> dict[str, Any]:
    """A picture within a conversation."""
    return link(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


PART = inline(DATA)
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], **fields}


def text_of(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["message"]["content"])


class Hosts:
    """Names and their addresses, and a listener that stands for all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = {
            "pics.example": [[PUBLIC]],
            "private.example": [["10.1.2.3"]],
            "loopback.example": [["127.0.0.1"]],
            "local.example": [["169.254.169.254"]],
            "inner.example": [["::ffff:192.168.0.1"]],
            "mixed.example": [[PUBLIC, "10.0.0.1"]],
            # What it is when it is asked again.
            "rebinding.example": [[PUBLIC], ["127.0.0.1"]],
        }
        self.heard: list[str] = []  # connections, and of each that says something, what it asks for
        self.is_over = threading.Event()
        self._server = _Listener(("127.0.0.1", 0), _Answers)
        self._server.hosts = self
        names = {"port": self._server.server_port, "names": self.names}
        (folder / "names.json").write_text(json.dumps(names))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def lines(self, name: str) -> list[str]:
        """What was `asked` or `dialled`."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()


PUBLIC = "93.184.216.34"
LARGE = 20_000_001


class _Listener(ThreadingHTTPServer):
    hosts: Hosts
    daemon_threads = True

    def get_request(self) -> Any:
        found = super().get_request()
        self.hosts.heard.append("a connection")
        return found

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has left."""


class _Answers(BaseHTTPRequestHandler):
    """What the hosts answer, by path."""

    server: _Listener

    def do_GET(self) -> None:
        self.server.hosts.heard.append(f"{self.headers['Host']}{self.path}")
        way = getattr(self, self.path[1:].partition(".")[0], None)
        if way is None:
            self._say(404, b"nothing here but a secret")
        else:
            way()

    def _say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def picture(self) -> None:
        self._say(200, DATA, Content_Type="text/html")  # its type is what it is

    def page(self) -> None:
        self._say(200, b"<html>a secret</html>", Content_Type="image/png")

    def redirected(self) -> None:
        self._say(302, Location="/picture.png")

    def again(self) -> None:
        self._say(302, Location="/again")

    def inwards(self) -> None:
        self._say(302, Location="http://private.example/picture.png")

    def elsewhere(self) -> None:
        self._say(307, Location="http://other.example/picture.png")

    def scheme(self) -> None:
        self._say(301, Location="file:///etc/passwd")

    def turned(self) -> None:
        self._say(302, Location="http://rebinding.example/picture.png")

    def large(self) -> None:
        self._say(200, Content_Length=str(LARGE))

    def endless(self) -> None:
        self._say(200, Content_Length="", Connection="close")
        while not self.server.hosts.is_over.is_set():
            self.wfile.write(bytes(1 << 20))

    def drip(self) -> None:
        self._say(200, Content_Length="1000")
        while not self.server.hosts.is_over.wait(0.05):
            self.wfile.write(b"x")

    def silent(self) -> None:
        self.server.hosts.is_over.wait(60)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class PictureServer(ClientServer):
    """One that fetches from the hosts of a test."""

    command = (sys.executable, str(Path(__file__).parent / "resolved_command.py"))

    def __init__(
        self,
        folder: Path,
        hosts: Hosts,
        *flags: str,
        write: Callable[[Path], Path] = write_tile_model,
        **variables: str,
    ) -> None:
        """`write` makes the folder of its model."""
        self.hosts, self._write = hosts, write
        path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
        given = {"PACELINE_TEST_NAMES": str(hosts.folder), "PYTHONPATH": path, **variables}
        super().__init__(folder, *flags, **given)

    def _model_flags(self) -> list[str]:
        model = self._write(self.folder / MODEL)
        named = ["--load-format", "dummy", "--served-model-name", MODEL]
        limit = ["--limit-mm-per-prompt", json.dumps({"image": MOST_PICTURES})]
        fetch = [
            "--allowed-media-domains",
            ",".join(["localhost", "no-such-host.invalid", *self.hosts.names]),
        ]
        # What is prepared stays in memory by design, and tests look at what stays otherwise.
        kept = ["--batch-dir", str(self.folder / "kept"), "--mm-processor-cache-gb", "0.02"]
        return [
            str(model),
            *named,
            *limit,
            *fetch,
            *kept,
            "--api-keys-file",
            str(keys_file(self.folder / "keys")),
        ]

    @property
    def engine(self) -> int:
        (pid,) = _children(self.process.pid)
        return pid

    def ask_chat(self, *parts: Any, **fields: Any) -> Reply:
        return self.ask("POST", CHAT, chat(*parts, **fields))

    def sing(self) -> str:
        """The canary."""
        return text_of(self.ask_chat(PART, TEXT))

    def resident_bytes(self) -> int:
        """Of the server's processes, when what was freed has been given back."""
        found = 0
        for pid in (self.process.pid, *_children(self.process.pid)):
            with suppress(FileNotFoundError, ProcessLookupError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
        return found


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


@contextmanager
def served(
    folder: Path, hosts: Hosts, write: Callable[[Path], Path] = write_tile_model
) -> Iterator[PictureServer]:
    """A server that is ready, and that has nothing left to do and nothing to complain about in the end."""
    server = PictureServer(folder, hosts, write=write)
    try:
        server.wait_for(200)
        yield server
        assert server.process.poll() is None, server.log()
        server.wait_until(server.is_idle)
        assert "Traceback" not in server.log(), server.log()
    finally:
        server.close()


MOST_GROWTH = 100_000_000


@contextmanager
def unharmed(server: PictureServer, song: str) -> Iterator[None]:
    """What is done meanwhile leaves nothing behind: the canary sings as before, and little memory was kept."""
    before = server.resident_bytes()
    yield
    assert server.sing() == song
    server.wait_until(server.is_idle)
    until_s = time.monotonic() + 10
    while server.resident_bytes() - before > MOST_GROWTH and time.monotonic() < until_s:
        time.sleep(0.1)
    assert server.resident_bytes() - before < MOST_GROWTH
