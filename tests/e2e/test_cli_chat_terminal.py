"""`paceline chat` on a terminal with colours: pastes, history, and Markdown. A stand-in for a server answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chat_terminal import Terminal
from tests.e2e.model_cli import TIMEOUT_S

ANSWER = "# Rivers\n\nThe **Nile**, `Amazon` and:\n\n- Elbe\n- Rhine\n"
PASTE, UP = "\x1b[200~{}\x1b[201~", "\x1b[A"
PROMPT = "\x1b[1;36m>>> \x1b[0m"


class Server(ThreadingHTTPServer):
    """Answers every conversation with the same text, a few characters at a time, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []

    @property
    def last_message(self) -> str:
        return str(self.asked[-1]["messages"][-1]["content"])


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "tiny", "max_model_len": 4096}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/chat/completions"):
            self.send_error(404)
            return
        self.server.asked.append(body)
        pieces = [ANSWER[start : start + 5] for start in range(0, len(ANSWER), 5)]
        events = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
        self._send("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def chat(server: Server, cache: Path, **more: str) -> Terminal:
    url = f"http://127.0.0.1:{server.server_port}"
    return Terminal("--url", url, cache=cache, **{"TERM": "xterm-256color", "NO_COLOR": "", **more})


def ask(terminal: Terminal, keys: str) -> str:
    """Type a message; returns what is shown up to the end of its answer."""
    terminal.type(keys)
    shown = terminal.wait_for("Rhine")
    terminal.wait_for(">>> ")
    return shown


def leave(terminal: Terminal) -> None:
    terminal.type("\x04")
    assert terminal.process.wait(TIMEOUT_S) == 0
    terminal.close()


def test_pastes_history_and_markdown(server: Server, tmp_path: Path) -> None:
    terminal = chat(server, tmp_path)
    terminal.wait_for(PROMPT)
    shown = ask(terminal, PASTE.format("/* first\r\rthird */") + " and more\r")
    assert server.last_message == "/* first\n\nthird */ and more", "a paste is one message, and no command"
    assert "\x1b[1mNile\x1b[0m" in shown and "\x1b[36mAmazon\x1b[0m" in shown and "Elbe" in shown
    final = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown)
    assert "Rivers" in final and "**Nile**" not in final and "`Amazon`" not in final
    assert "\x1b[2J" not in shown and "\x1b[H" not in shown, "the screen is not cleared"

    ask(terminal, '"""one\rtwo"""\r')
    assert server.last_message == "one\ntwo"
    ask(terminal, UP + UP + "!\r")
    assert server.last_message == "/* first\n\nthird */ and more!", "an arrow brings back a whole message"
    leave(terminal)

    again = chat(server, tmp_path)
    again.wait_for(PROMPT)
    ask(again, UP + UP + "?\r")
    assert server.last_message == "one\ntwo?", "also those of the last conversation"
    leave(again)


def test_without_colour_an_answer_is_what_the_model_wrote(server: Server, tmp_path: Path) -> None:
    terminal = chat(server, tmp_path, NO_COLOR="1")
    terminal.wait_for(">>> ")
    assert ANSWER.strip().replace("\n", "\r\n") in ask(terminal, "hello\r")
    leave(terminal)
