"""Writes src/paceline/server/api/examples.json: a request and the answer of a real server for the routes of the API.

`python -m tools.api_examples` starts a server of the default model and records what it answers. A test sends the same
requests to a server of a tiny model and compares the shapes, so that an example cannot differ from the code.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.server.app import EXAMPLES_FILE

Json = Any
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = 6  # tokens of an answer
CHAT = "/v1/chat/completions"
# What is sent to the routes that generate; each is recorded whole and as a stream.
GENERATING: dict[str, Json] = {
    CHAT: {"messages": HELLO, "max_tokens": SHORT, "temperature": 0},
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": SHORT, "temperature": 0},
    "/v1/responses": {"input": HELLO[0]["content"], "max_output_tokens": SHORT, "temperature": 0},
    "/v1/messages": {"messages": HELLO, "max_tokens": SHORT, "temperature": 0},
}
POSTED: dict[str, Json] = {
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "Hello!", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/estimate": {"messages": HELLO, "max_tokens": 64},
}
READ = (
    *("/v1/models", "/tokenizer_info", "/v1/admin/dial", "/v1/admin/policy", "/v1/admin/usage"),
    *("/v1/admin/about", "/health", "/health/ready", "/health/live", "/health/deep", "/ping", "/version"),
)
CHANGED: dict[str, Json] = {"/v1/admin/dial": {"off": True}, "/v1/admin/policy": {"policy": "fcfs"}}
LINE = {"custom_id": "first", "method": "POST", "url": CHAT}
MANUAL = "Lamps are lit at dusk. Reserve lamps are tested on Mondays."
BOUNDARY = "paceline-example"


class Recorder:
    """Sends the requests of the examples to one server."""

    def __init__(self, port: int, key: str = "") -> None:
        self._port = port
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.model = self._json("GET", "/v1/models")["data"][0]["id"]

    def record(self) -> dict[str, dict[str, Json]]:
        """The examples by "METHOD /path" as the OpenAPI document names it."""
        found: dict[str, dict[str, Json]] = {}
        for path, body in GENERATING.items():
            request = {"model": self.model, **body}
            stream = self._send("POST", path, {**request, "stream": True}).decode()
            found[f"POST {path}"] = {
                "request": request,
                "response": self._json("POST", path, request),
                "stream": stream,
                "error": json.loads(self._send("POST", path, {**request, "temperature": "hot"}, status=400)),
            }
        for path, body in POSTED.items():
            request = {"model": self.model, **body}
            found[f"POST {path}"] = {"request": request, "response": self._json("POST", path, request)}
        found["GET /v1/models/{id}"] = {"response": self._json("GET", f"/v1/models/{self.model}")}
        found |= {f"GET {path}": {"response": self._json("GET", path)} for path in READ}
        for path, body in CHANGED.items():
            found[f"PUT {path}"] = {"request": body, "response": self._json("PUT", path, body)}
        return found | self._contexts() | self._requests() | self._trees() | self._batches() | self._sleep()

    def _contexts(self) -> dict[str, dict[str, Json]]:
        """A context that is made, looked at and deleted."""
        path, given = "/v1/contexts", {"name": "lamps", "text": MANUAL, "ttl_s": 600, "pin": False}
        made = self._json("POST", path, given)
        at = f"{path}/{made['id']}"
        return {
            f"POST {path}": {"request": given, "response": made},
            f"GET {path}": {"response": self._json("GET", path)},
            f"GET {path}/{{id}}": {"response": self._json("GET", at)},
            f"DELETE {path}/{{id}}": {"response": self._json("DELETE", at)},
        }

    def _sleep(self) -> dict[str, dict[str, Json]]:
        """The model is put to sleep and woken, under both names."""
        path, level = "/v1/models/{id}", "?level=1&mode=abort"
        at = path.replace("{id}", self.model)
        return {
            f"POST {path}/sleep": {"response": self._json("POST", f"{at}/sleep{level}")},
            f"POST {path}/wake": {"response": self._json("POST", f"{at}/wake")},
            "POST /sleep": {"response": self._json("POST", f"/sleep{level}")},
            "GET /is_sleeping": {"response": self._json("GET", "/is_sleeping")},
            "POST /wake_up": {"response": self._json("POST", "/wake_up")},
        }

    def _requests(self) -> dict[str, dict[str, Json]]:
        """A request that is changed while it runs, and explained."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        body = {"model": self.model, "messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True}
        headers = {"content-type": "application/json", **self._headers}
        connection.request("POST", CHAT, json.dumps(body), headers)
        answer = connection.getresponse()
        name = answer.getheader("x-request-id")
        change = {"priority": 10}
        changed = self._json("PATCH", f"/v1/requests/{name}", change)
        story = self._json("GET", f"/v1/requests/{name}/explain")
        number = story["branches"][0]["number"]
        any_story = self._json("GET", f"/v1/admin/requests/{number}/explain")
        connection.close()
        return {
            "PATCH /v1/requests/{id}": {"request": change, "response": changed},
            "GET /v1/requests/{id}/explain": {"response": story},
            "GET /v1/admin/requests/{id}/explain": {"response": any_story},
        }

    def _trees(self) -> dict[str, dict[str, Json]]:
        """An answer that is forked, extended and pruned while it is held."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        held = {"max_tokens": 8, "ignore_eos": True, "stream": True, "on_stop": "hold"}
        body = json.dumps({"model": self.model, "messages": HELLO, **held})
        connection.request("POST", CHAT, body, {"content-type": "application/json", **self._headers})
        answer = connection.getresponse()
        name, path = answer.getheader("x-request-id"), "/v1/requests/{id}"
        while b'"held"' not in answer.readline():
            pass
        fork, more, score = {"n": 2, "max_tokens": 4}, {"text": " So", "max_tokens": 8}, {"score": 1.5}
        found: dict[str, dict[str, Json]] = {}
        for place in (path, path + "/{branch}"):
            at = place.replace("{id}", str(name)).replace("{branch}", "0")
            found[f"POST {place}/fork"] = {
                "request": fork,
                "response": self._json("POST", f"{at}/fork", fork),
            }
            found[f"POST {place}/extend"] = {
                "request": more,
                "response": self._json("POST", f"{at}/extend", more),
            }
        changed = self._json("PATCH", f"/v1/requests/{name}/0", score)
        found[f"PATCH {path}/{{branch}}"] = {"request": score, "response": changed}
        found[f"GET {path}/tree"] = {"response": self._json("GET", f"/v1/requests/{name}/tree")}
        ended = {"branches": [0]}
        pruned = self._json("POST", f"/v1/requests/{name}/prune", ended)
        found[f"POST {path}/prune"] = {"request": ended, "response": pruned}
        connection.close()
        return found

    def _batches(self) -> dict[str, dict[str, Json]]:
        line = json.dumps({**LINE, "body": {"model": self.model, **GENERATING[CHAT]}})
        form = (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="requests.jsonl"\r\n\r\n'
            f"{line}\n\r\n--{BOUNDARY}--\r\n"
        )
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        file = json.loads(self._send("POST", "/v1/files", form.encode(), kind=kind))
        wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        begun = self._json("POST", "/v1/batches", wanted)
        done = begun
        while done["status"] not in ("completed", "failed"):
            time.sleep(0.1)
            done = self._json("GET", f"/v1/batches/{begun['id']}")
        assert done["status"] == "completed", done
        listed = self._json("GET", "/v1/batches")
        other = self._json("POST", "/v1/batches", wanted)
        cancelled = self._json("POST", f"/v1/batches/{other['id']}/cancel", {})
        output = self._send("GET", f"/v1/files/{done['output_file_id']}/content").decode()
        return {
            "POST /v1/files": {"response": file},
            "GET /v1/files": {"response": self._json("GET", "/v1/files?purpose=batch")},
            "GET /v1/files/{id}": {"response": self._json("GET", f"/v1/files/{file['id']}")},
            "GET /v1/files/{id}/content": {"text": output},
            "POST /v1/batches": {"request": wanted, "response": begun},
            "GET /v1/batches": {"response": listed},
            "GET /v1/batches/{id}": {"response": done},
            "POST /v1/batches/{id}/cancel": {"response": cancelled},
            "DELETE /v1/files/{id}": {
                "response": self._json("DELETE", f"/v1/files/{done['output_file_id']}")
            },
        }

    def _json(self, method: str, path: str, body: Json = None) -> Json:
        return json.loads(self._send(method, path, body))

    def _send(
        self,
        method: str,
        path: str,
        body: Json = None,
        *,
        kind: str = "application/json",
        status: int = 200,
    ) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**self._headers, **({} if data is None else {"content-type": kind})}
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status == status, f"{method} {path}: {answer.status} {text.decode(errors='replace')}"
        return text


@contextmanager
def default_server() -> Iterator[int]:
    """A server of the default model that has files, batches and a ledger; gives its port."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--port", "0", "--batch-dir", f"{folder}/batches", "--ledger", f"{folder}/ledger.db")
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.match(r"API: .*:(\d+)", line):
                    port = int(found[1])
                if line.startswith("try: "):
                    break
            yield port
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    with default_server() as port:
        examples = Recorder(port).record()
    EXAMPLES_FILE.write_text(json.dumps(examples, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
