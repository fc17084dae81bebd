"""Live trees on a real server: branches equal fresh requests, and end with the client that reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.e2e.client_server import ENDLESS, KEY, MODEL, NARROW_KEY, ClientServer, client_server
from tests.e2e.crowd import crowd, requests_of_a_crowd
from tests.e2e.http_server import request_bytes

PROMPT = list(range(40, 60))
PLAIN = {
    "model": MODEL,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "allowed_token_ids": list(range(30, 90)),  # characters
}


ROWS = 12
FLAGS = ("--stream-keep-alive", "0.2", "--max-num-seqs", str(ROWS))
SATURATED = pytest.mark.parametrize("server", ["at rest", "saturated"], indirect=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), *FLAGS) as started:
        started.wait_for(200)
        yield started


@pytest.fixture
def server(running: ClientServer, request: pytest.FixtureRequest) -> Iterator[ClientServer]:
    """The server of this file; nothing of a test is left on it."""
    with ExitStack() as stack:
        if getattr(request, "param", "") == "saturated":
            requests = requests_of_a_crowd(MODEL, signed)
            stack.enter_context(
                crowd(running.port, requests, partial(wait_until_full, running), clients=ROWS + 4)
            )
        yield running
    running.wait_until(running.is_idle)


def signed(path: str, body: dict[str, Any]) -> bytes:
    named = (f"Authorization: Bearer {KEY}",)
    return request_bytes("POST", path, json.dumps(body).encode(), headers=named)


def wait_until_full(server: ClientServer) -> None:
    server.wait_until(lambda: server.metric("num_requests_waiting") > 0)


class Stream:
    """Chunks of an answer as they come."""

    def __init__(self, server: ClientServer, path: str = "/v1/completions", **fields: Any) -> None:
        key = fields.pop("key", KEY)
        own = {**PLAIN, "prompt": PROMPT, "max_tokens": 8} if path == "/v1/completions" else {}
        self._answer = server.open("POST", path, {**own, "stream": True, **fields}, key=key)
        assert self._answer.status == 200, self._answer.read()
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.held: dict[int, str] = {}
        self.ends: dict[int, tuple[str, Any]] = {}
        self.injected: list[str] = []
        self.spelled: list[str] = []  # tokens with a known probability
        self.fork: dict[str, Any] = {}
        self.usage: dict[str, Any] = {}
        self.id = ""

    def read(self) -> bool:
        """One line of the stream; False at its end."""
        line = self._answer.readline()
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            self.id = chunk["id"].removeprefix("cmpl-").removeprefix("chatcmpl-")
            self.usage = chunk.get("usage") or self.usage
            self.fork = chunk.get("fork") or self.fork
            for choice in chunk["choices"]:
                self._take(choice)
        return bool(line) and b"[DONE]" not in line

    def _take(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        self.texts[index] = self.texts.get(index, "") + text
        self.tokens.setdefault(index, []).extend(choice.get("token_ids", ()))
        if text:
            self.held.pop(index, None)
        if isinstance((choice.get("logprobs") or {}).get("content"), list):
            self.spelled += [each["token"] for each in choice["logprobs"]["content"]]
        if choice.get("injected"):
            self.injected.append(text)
        if "held" in choice:
            self.held[index] = choice["held"]
        if choice["finish_reason"]:
            self.ends[index] = (choice["finish_reason"], choice["stop_reason"])

    def until_held(self, index: int = 0) -> None:
        self.held.pop(index, None)
        while index not in self.held:
            assert self.read()

    def rest(self) -> None:
        while self.read():
            pass

    def close(self) -> None:
        self._answer.close()


def continued(server: ClientServer, tokens: list[int], count: int) -> list[int]:
    """What a fresh request makes of these tokens."""
    body = {**PLAIN, "prompt": tokens, "max_tokens": count}
    found: list[int] = server.ask("POST", "/v1/completions", body).json["choices"][0]["token_ids"]
    return found


def post(server: ClientServer, path: str, **given: Any) -> tuple[int, Any]:
    answer = server.ask("POST", f"/v1/requests/{path}", given)
    return answer.status, answer.json


@SATURATED
def test_branches_of_a_held_answer_equal_fresh_requests(server: ClientServer) -> None:
    stream = Stream(server, on_stop="hold")
    stream.until_held()
    assert stream.held == {0: "length"} and len(stream.tokens[0]) == 8
    expected = continued(server, PROMPT + stream.tokens[0], 5)
    status, found = post(server, f"{stream.id}/fork", n=2, max_tokens=5)
    assert status == 200 and found["id"] == f"cmpl-{stream.id}"
    assert found["fork"]["branches"] == [f"{stream.id}/1", f"{stream.id}/2"]
    assert (found["fork"]["parent"], found["fork"]["at"]) == (f"{stream.id}/0", 8)
    assert found["fork"]["text"] == stream.texts[0]
    assert [choice["index"] for choice in found["choices"]] == [1, 2]
    for choice in found["choices"]:
        assert choice["token_ids"] == stream.tokens[0] + expected and choice["finish_reason"] == "length"
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (28, 10)
    # Of an earlier token, with tokens behind it.
    status, found = post(server, f"{stream.id}/fork", at=3, append=[70, 71], max_tokens=4)
    begin = [*stream.tokens[0][:3], 70, 71]
    assert found["choices"][0]["token_ids"] == begin + continued(server, PROMPT + begin, 4)
    stream.close()


@SATURATED
def test_a_held_answer_is_extended_and_goes_on_in_its_stream(server: ClientServer) -> None:
    stream = Stream(server, on_stop="hold", stream_options={"include_usage": True})
    stream.until_held()
    first = list(stream.tokens[0])
    assert post(server, f"{stream.id}/extend", tokens=[70, 71], max_tokens=6)[0] == 200
    stream.until_held()
    begin = [*first, 70, 71]
    assert stream.tokens[0] == begin + continued(server, PROMPT + begin, 6)
    assert len(stream.injected) == 1
    status, told = post(server, f"{stream.id}/0/extend", text="hi", max_tokens=2)
    assert (status, told) == (200, {"id": f"{stream.id}/0", "object": "request.extension", "tokens": 2})
    stream.until_held()
    assert stream.injected[1] == "hi" and len(stream.tokens[0]) == 8 + 2 + 6 + 2 + 2
    assert post(server, f"{stream.id}/prune")[0] == 200
    stream.rest()
    assert stream.ends == {0: ("abort", "pruned")}
    # What was put in is billed as input.
    assert (stream.usage["prompt_tokens"], stream.usage["completion_tokens"]) == (20 + 4, 8 + 6 + 2)


def test_a_stop_string_holds_and_becomes_text_when_the_answer_goes_on(server: ClientServer) -> None:
    whole = Stream(server, max_tokens=12)
    whole.rest()
    text = whole.texts[0]
    stop = text[6:8]
    stream = Stream(server, max_tokens=12, on_stop="hold", stop=[stop])
    stream.until_held()
    assert stream.texts[0] == text[: text.index(stop)] and stream.held[0] == "stop"
    assert post(server, f"{stream.id}/extend", text="!")[0] == 200
    while not stream.injected:
        stream.read()
    assert stream.texts[0].startswith(text[: text.index(stop)] + stop + "!")
    stream.close()


@pytest.mark.parametrize("is_held", [True, False])
def test_probabilities_go_on_behind_what_was_put_in(server: ClientServer, is_held: bool) -> None:
    messages = [{"role": "user", "content": "hello"}]
    length = {"max_tokens": 6, "on_stop": "hold"} if is_held else {"max_tokens": ENDLESS}
    body = {**PLAIN, "messages": messages, "logprobs": True, "top_logprobs": 2, **length}
    stream = Stream(server, "/v1/chat/completions", **body)
    while len(stream.texts.get(0, "")) < 6:
        stream.read()
    assert post(server, f"{stream.id}/extend", text="abc", max_tokens=20)[0] == 200
    while "abc" not in stream.texts[0][-15:]:
        stream.read()
    while len(stream.texts[0].split("abc", 1)[1]) < 20:
        assert stream.read()
    put_in = stream.texts[0].index("abc")
    spelled = "".join(stream.spelled)
    assert len(stream.spelled) == len(stream.tokens[0]) - 3  # all but what was put in
    assert spelled == stream.texts[0][:put_in] + stream.texts[0][put_in + 3 :]
    stream.close()


def test_a_fork_is_streamed_in_its_parents_format_and_seen_in_the_tree(server: ClientServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    parent = Stream(
        server,
        "/v1/chat/completions",
        messages=messages,
        **{**PLAIN, "max_tokens": 6, "on_stop": "hold", "return_token_ids": False},
    )
    parent.until_held()
    path = f"/v1/requests/{parent.id}/fork"
    branches = Stream(server, path, n=3, max_tokens=ENDLESS, temperature=1.0, seed=4, score=0.5)
    while len(branches.texts) < 3 or not all(branches.texts.values()):
        branches.read()
    assert sorted(branches.texts) == [1, 2, 3] and branches.id == parent.id
    assert branches.fork["branches"] == [f"{parent.id}/{index}" for index in (1, 2, 3)]
    assert server.ask("PATCH", f"/v1/requests/{parent.id}/2", {"score": 4.0}).status == 200
    tree = server.ask("GET", f"/v1/requests/{parent.id}/tree").json
    states = {each["id"]: (each["parent"], each["state"], each["score"]) for each in tree["branches"]}
    assert states[f"{parent.id}/0"] == (None, "held", 0.0)
    told = server.ask("GET", f"/v1/requests/{parent.id}/explain").json["branches"]
    assert [each["state"] for each in told] == ["held", "running", "running", "running"]
    assert states[f"{parent.id}/2"] == (f"{parent.id}/0", "running", 4.0) and len(states) == 4
    status, told = post(server, f"{parent.id}/prune", branches=[1])
    assert (status, told["pruned"]) == (200, [f"{parent.id}/1"])
    while not branches.ends:
        branches.read()
    assert branches.ends == {1: ("abort", "pruned")}
    # A branch of a branch; the parent's client leaves, and branches that are read go on.
    (deeper,) = [Stream(server, f"/v1/requests/{parent.id}/2/fork", max_tokens=ENDLESS)]
    deeper.read()
    parent.close()
    length = len(deeper.texts.get(4, ""))
    while len(deeper.texts.get(4, "")) < length + 20:
        assert deeper.read()
    # The client of a fork leaves: its branches end, others go on.
    branches.close()

    def only_one_is_left() -> bool:
        found = server.ask("GET", f"/v1/requests/{parent.id}/tree").json
        return [each["id"] for each in found["branches"]] == [f"{parent.id}/4"]

    server.wait_until(only_one_is_left)
    deeper.close()


@pytest.mark.parametrize(("path", "asked"), [("/v1/responses", "input"), ("/v1/messages", "messages")])
def test_answers_of_other_formats_are_forked_as_chat_completions(
    server: ClientServer, path: str, asked: str
) -> None:
    body = {
        "model": MODEL,
        asked: [{"role": "user", "content": "hello"}],
        "max_tokens" if asked == "messages" else "max_output_tokens": ENDLESS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    answer = server.open("POST", path, body)
    assert answer.status == 200, answer.read()
    name, said = "", 0
    while said < 3:
        line = answer.readline()
        event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
        named = event.get("response") or event.get("message") or {}
        name = named.get("id", name).removeprefix("resp_").removeprefix("msg_")
        said += "delta" in str(event.get("type"))
    status, whole = post(server, f"{name}/fork", n=2, at=2, max_tokens=3, temperature=0)
    assert (status, whole["object"]) == (200, "chat.completion"), whole
    assert [choice["index"] for choice in whole["choices"]] == [1, 2]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == 1, "both are greedy"
    branch = Stream(server, f"/v1/requests/{name}/0/fork", at=2, max_tokens=3)
    branch.rest()
    assert branch.fork["text"] + branch.texts[3] == whole["choices"][0]["message"]["content"]
    assert branch.ends[3][0] == "length"
    answer.close()


@SATURATED
def test_what_cannot_be_done_is_refused(server: ClientServer) -> None:
    stream = Stream(server, on_stop="hold", tree={"max_branches": 3, "max_tokens": 40})
    stream.until_held()
    for path, given, status, code, param in (
        ("nothing/fork", {}, 404, "request_not_found", None),
        (f"{stream.id}/7/fork", {}, 404, "request_not_found", None),
        (f"{stream.id}/fork", {"at": 9}, 400, "invalid_value", "at"),
        (f"{stream.id}/fork", {"append": [10**6]}, 400, "invalid_value", "append"),
        (f"{stream.id}/fork", {"append": 5}, 400, "invalid_value", "append"),
        (f"{stream.id}/fork", {"n": 0}, 400, "invalid_value", "n"),
        (f"{stream.id}/fork", {"colour": 1}, 400, "unknown_parameter", "colour"),
        (f"{stream.id}/fork", {"n": 3, "max_tokens": 2}, 429, "tree_limit_exceeded", None),
        (f"{stream.id}/fork", {"n": 1, "max_tokens": 33}, 429, "tree_limit_exceeded", None),
        (f"{stream.id}/fork", {"on_stop": "hold"}, 400, "invalid_value", "on_stop"),
        (f"{stream.id}/fork", {}, 409, "request_busy", None),  # it has all its tokens
        (f"{stream.id}/extend", {}, 400, "invalid_value", "text"),
        (f"{stream.id}/extend", {"text": "a", "tokens": [1]}, 400, "invalid_value", "tokens"),
        (f"{stream.id}/extend", {"text": "a"}, 409, "request_busy", None),  # nothing is left to generate
        (
            f"{stream.id}/extend",
            {"text": "a", "max_tokens": 10**9},
            400,
            "context_length_exceeded",
            "max_tokens",
        ),
        (f"{stream.id}/prune", {"branches": [5]}, 404, "request_not_found", None),
    ):
        found, told = post(server, path, **given)
        assert (found, told["error"]["code"], told["error"]["param"]) == (status, code, param), (
            path,
            given,
            told,
        )
    for path in ("fork", "extend", "prune"):
        answer = server.ask(
            "POST",
            f"/v1/requests/{stream.id}/{path}",
            {"max_tokens": 1} if path != "prune" else {},
            key=NARROW_KEY,
        )
        assert (answer.status, answer.json["error"]["code"]) == (404, "request_not_found")
    assert server.ask("GET", f"/v1/requests/{stream.id}/tree", key=NARROW_KEY).status == 404
    body = {**PLAIN, "prompt": PROMPT, "max_tokens": 2}
    for more, param in (
        ({"on_stop": "hold"}, "on_stop"),
        ({"on_stop": "wait"}, "on_stop"),
        ({"tree": {"max_rows": 0}}, "tree"),
        ({"tree": {"rows": 3}}, "tree"),
        ({"stream": True, "on_stop": "hold", "hold_s": 0}, "hold_s"),
    ):
        answer = server.ask("POST", "/v1/completions", {**body, **more})
        assert (answer.status, answer.json["error"]["param"]) == (400, param), (more, answer.json)
    assert post(server, f"{stream.id}/prune")[0] == 200
    stream.rest()
    for path in ("fork", "prune"):
        assert post(server, f"{stream.id}/{path}")[0] == 404
    assert post(server, f"{stream.id}/extend", text="a")[0] == 404
    assert server.ask("GET", f"/v1/requests/{stream.id}/tree").status == 404


@SATURATED
def test_branches_count_against_what_a_key_may_run_at_once(server: ClientServer) -> None:
    stream = Stream(server, key=NARROW_KEY, on_stop="hold")
    stream.until_held()
    path = f"/v1/requests/{stream.id}"
    refused = server.ask("POST", f"{path}/fork", {"n": 1, "max_tokens": 2}, key=NARROW_KEY)
    assert (refused.status, refused.json["error"]["code"]) == (429, "concurrency_exceeded")
    assert len(server.ask("GET", f"{path}/tree", key=NARROW_KEY).json["branches"]) == 1
    assert server.ask("POST", f"{path}/prune", {}, key=NARROW_KEY).status == 200
    stream.rest()


@SATURATED
def test_a_branch_that_is_not_used_again_ends(server: ClientServer) -> None:
    stream = Stream(server, on_stop="hold", hold_s=0.2)
    stream.until_held()
    stream.rest()
    assert stream.ends == {0: ("length", None)}


def test_searches_find_what_a_program_finds(server: ClientServer) -> None:
    body = {**PLAIN, "prompt": PROMPT, "max_tokens": 12}
    del body["allowed_token_ids"]
    plain = server.ask("POST", "/v1/completions", body).json
    # A beam of one is greedy.
    beam = server.ask("POST", "/v1/completions", {**body, "search": {"type": "beam", "width": 1}}).json
    assert beam["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    wide = server.ask(
        "POST",
        "/v1/completions",
        {**body, "use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.5},
    ).json
    scores = [each["score"] for each in wide["search"]["candidates"]]
    assert len(wide["choices"]) == 2 and len(scores) == 4 and scores == sorted(scores, reverse=True)
    drawn = {**PLAIN, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 5}
    best = server.ask("POST", "/v1/completions", {**drawn, "best_of": 4}).json
    assert len(best["choices"]) == 1 and best["search"]["branches"] == 4
    assert best["usage"]["completion_tokens"] == best["search"]["generated_tokens"] == 48
    assert best["usage"]["prompt_tokens"] == len(PROMPT)
    halved = server.ask("POST", "/v1/completions", {**drawn, "search": {"type": "best_of", "n": 8}}).json
    assert halved["usage"]["completion_tokens"] == 8 * 3 + 4 * 3 + 2 * 6
    messages = [{"role": "user", "content": "hello"}]
    chat = {**PLAIN, "messages": messages, "max_tokens": 10, "temperature": 1.0}
    for search in (
        {"type": "self_consistency", "n": 4, "after": "e"},
        {"type": "self_consistency", "n": 4, "pattern": "(.)"},
        {"type": "tree_of_thought", "width": 2, "keep": 2, "depth": 2, "step_tokens": 4, "score": "judge"},
        {"type": "probe", "every": 4, "answer_tokens": 3},
    ):
        found = server.ask("POST", "/v1/chat/completions", {**chat, "search": search})
        assert found.status == 200, found.json
        assert found.json["choices"][0]["message"]["content"]
        assert found.json["usage"]["completion_tokens"] == found.json["search"]["generated_tokens"] > 0


@SATURATED
def test_a_pattern_that_takes_for_ever_ends_its_search_alone(server: ClientServer) -> None:
    body = {**PLAIN, "prompt": PROMPT, "max_tokens": 60, "temperature": 1.0, "seed": 5}
    search = {"type": "self_consistency", "n": 2, "pattern": r"(.+)+\x01"}
    found = server.ask("POST", "/v1/completions", {**body, "search": search})
    assert (found.status, found.json["error"]["param"]) == (400, "search"), found.json
    assert "too long" in found.json["error"]["message"]
    found = server.ask("POST", "/v1/completions", {**body, "search": {**search, "pattern": r"\S"}})
    assert found.json["search"]["candidates"][0]["answer"] == found.json["choices"][0]["text"].split()[-1][-1]


@SATURATED
def test_searches_that_cannot_be_are_refused(server: ClientServer) -> None:
    body = {**PLAIN, "prompt": PROMPT, "max_tokens": 4}
    for more, param in (
        ({"search": {"type": "luck"}}, "search"),
        ({"search": {}}, "search"),
        ({"search": {"type": "best_of", "n": 0}}, "search"),
        ({"search": {"type": "best_of", "n": 129}}, "search"),
        ({"search": {"type": "best_of", "colour": 1}}, "search"),
        ({"search": {"type": "self_consistency", "pattern": "(a"}}, "search"),
        ({"search": {"type": "best_of"}, "best_of": 3}, "search"),
        ({"search": {"type": "best_of"}, "prompt": ["a", "b"]}, "search"),
        ({"search": {"type": "beam"}, "stop": "a"}, "stop"),
        ({"search": {"type": "beam"}}, "allowed_token_ids"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "stream"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ):
        answer = server.ask("POST", "/v1/completions", {**body, **more})
        assert (answer.status, answer.json["error"]["param"]) == (400, param), (more, answer.json)
    narrow = server.ask("POST", "/v1/completions", {**body, "best_of": 3}, key=NARROW_KEY)
    assert (narrow.status, narrow.json["error"]["param"]) == (400, "n")
    limited = {**body, "search": {"type": "best_of", "n": 4}, "tree": {"max_branches": 3}}
    assert server.ask("POST", "/v1/completions", limited).json["error"]["code"] == "tree_limit_exceeded"
