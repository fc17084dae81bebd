"""A real `paceline serve` on a tiny made-up model, with keys, a log in a file, and secrets planted around it.

The secrets are what must never come out again: keys, a variable of the environment, the model's path and what
another tenant asked. Everything that comes back is kept, so that it can be searched for them.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.e2e.http_server import Reply, read_reply, request_bytes
from tests.e2e.model_cli import environment
from tests.model_folder import CONTROLS, write_model
from tests.waiting import wait_until

ANSWER_S = 60.0
NAME = "tiny"
KEYS = {
    "alpha": "canary-key-alpha-7f3a",
    "beta": "canary-key-beta-91cc",
    "gone": "canary-key-gone-5e10",
    "low": "canary-key-low-c2d4",
    "holder": "canary-key-holder-08b7",
    "metered": "canary-key-metered-4a61",
    "rare": "canary-key-rare-e95d",
}
RULES: dict[str, dict[str, Any]] = {
    "gone": {"enabled": False},
    "low": {"lowest_priority_number": 0, "max_concurrency": 2},
    "metered": {"tokens_per_minute": 120, "requests_per_minute": 600, "class": "batch"},
    "rare": {"requests_per_minute": 1},
}
FOLDER, VARIABLE = "canary-folder-d41d", "canary-variable-3b9f"
OTHERS_PROMPT = "canary prompt of beta 6e0c"
# Shows everything of a message that a template can show, and refuses what one word asks it to refuse.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for message in messages %}"
    "{% if message['content'] == 'please raise' %}{{ raise_exception('words of the template') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\\n' }}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['arguments'] | tojson }}"
    "{% for value in call['function']['arguments'].values() %}{{ value }}{% endfor %}{% endfor %}"
    "{{ '<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


# A token for every byte, so that any text has tokens and characters can be cut in two. The others only make the
# vocabulary larger than the largest number of biases.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = (*CONTROLS, *ALPHABET, *(f"q{number}" for number in range(44)))
VOCAB_SIZE = len(TOKENS)


def token_id(spelled: str) -> int:
    """The id of a byte by the letter that stands for it; of those used here, the byte's own in Latin-1."""
    return TOKENS.index(spelled)


def write_byte_model(folder: Path, context: int) -> Path:
    write_model(folder, template=TEMPLATE, max_position_embeddings=context, vocab_size=VOCAB_SIZE)
    backend = Backend(models.BPE({token: index for index, token in enumerate(TOKENS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(CONTROLS))
    backend.save(str(folder / "tokenizer.json"))
    return folder


class TinyServer:
    """A running server and everything it has said."""

    def __init__(self, place: Path, *flags: str, context: int = 256, **variables: str) -> None:
        self.folder = write_byte_model(place / FOLDER / NAME, context)
        self.log_path = place / "log"
        self.said: list[bytes] = []
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "paceline", "serve", str(self.folder)),
                    *("--load-format", "dummy", "--port", "0", "--log-format", "json", "--pooling", "mean"),
                    # A machine that is busy with other tests may let an engine wait.
                    *("--stuck-after-s", "60", "--restart-after-s", "120"),
                    *("--api-keys-file", str(_write_keys(place / "keys.jsonl")), *flags),
                ],
                env=environment(place, PACELINE_TEST_SECRET=VARIABLE, **variables),
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            self.port = self._read_card()
        except BaseException:
            self.close()
            raise
        self.loaded_at = len(self.log)

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _read_card(self) -> int:
        """The port; the card comes when the model is loaded, or nothing when the start failed."""
        assert self.process.stdout is not None
        self.card = b""
        for line in self.process.stdout:
            self.card += line
            if line.startswith(b"API: "):
                port = int(line.rpartition(b":")[2].partition(b"/")[0])
            if line.startswith(b"try: "):
                return port
        raise AssertionError(f"the server did not start:\n{self.log[-3000:]}")

    def raw(self, data: bytes, *, timeout_s: float = ANSWER_S) -> Reply:
        """Send bytes on a separate connection and read until the server closes it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout_s) as client:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused early; the answer is there
                client.sendall(data)
            reply = read_reply(client)
        self.said.append(reply.raw)
        return reply

    def get(self, path: str, *headers: str, method: str = "GET", key: str | None = "alpha") -> Reply:
        return self.raw(signed(method, path, None, *headers, key=key))

    def post(self, path: str, body: Any, *headers: str, key: str | None = "alpha") -> Reply:
        return self.raw(signed("POST", path, body, *headers, key=key))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.get("/metrics").body.decode().splitlines()
        found = [
            float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == f"paceline:{name}"
        ]
        assert found, name
        return sum(found)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        wait_until(condition, seconds, every_s=0.05)

    def wait_until_idle(self) -> None:
        """Nothing runs or waits, and no block is held but those that a request has asked to be kept."""
        names = ("num_requests_running", "num_requests_waiting", "generations_under_way")
        self.wait_until(lambda: not any(map(self.metric, names)) and self.blocks_in_use() == 0)

    def blocks_in_use(self) -> int:
        """KV blocks, without those that are pinned."""
        page = self.get("/metrics").body.decode()
        number = re.search(r'num_gpu_blocks="(\d+)"', page)
        pinned = re.search(r'kv_pinned_blocks\{.*state="held".*\} (\S+)', page)
        assert number and pinned
        return round(self.metric("kv_cache_usage_perc") * int(number[1]) - float(pinned[1]))

    def resident_bytes(self) -> int:
        """Memory of the HTTP process that is its own."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def tiny_server(place: Path, *flags: str, **options: Any) -> Iterator[TinyServer]:
    server = TinyServer(place, *flags, **options)
    try:
        yield server
    finally:
        server.close()


def signed(method: str, path: str, body: Any, *headers: str, key: str | None = "alpha") -> bytes:
    """A whole request; a body that is not bytes is written as JSON."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    own = () if key is None else (f"Authorization: Bearer {KEYS[key]}",)
    return request_bytes(method, path, data, headers=(*own, *headers))


def _write_keys(path: Path) -> Path:
    lines = [
        json.dumps({"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **RULES.get(name, {})})
        for name, key in KEYS.items()
    ]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path
