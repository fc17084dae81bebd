"""The examples of /docs and /openapi.json are what a server answers: to the same requests answers of the same shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.server.api.pooled_forms import FORMS
from paceline.server.app import EXAMPLES_FILE
from tests.e2e.client_server import ADMIN, client_server
from tools.api_examples import GENERATING, Recorder
from tools.api_pages import all_routes

Examples = dict[str, dict[str, Any]]
# A field that only some tokenizers have, and the figures of a decision, which depend on what happened.
VARYING = (".unk_token", ".decisions[0]")


@pytest.fixture(scope="module")
def stored() -> Examples:
    found: Examples = json.loads(EXAMPLES_FILE.read_text())
    return found


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examples]:
    """What a server of a tiny model answers to the same requests."""
    folder = tmp_path_factory.mktemp("server")
    flags = ("--batch-dir", str(folder / "batches"), "--ledger", str(folder / "ledger.db"))
    with client_server(folder, *flags, PACELINE_ADMIN_KEY=ADMIN) as server:
        server.wait_for(200)
        yield Recorder(server.port, ADMIN).record()


def shape(value: Any) -> Any:
    """Names and kinds of values. Of a list its first entry counts, since lists differ in length."""
    if isinstance(value, dict):
        return {name: shape(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [shape(entry) for entry in value[:1]]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


def differences(stored: Any, answered: Any, at: str) -> Iterator[str]:
    """Where two shapes differ. Nothing is concluded from a null and from an empty list."""
    if "NoneType" in (stored, answered) or [] in (stored, answered):
        return
    if isinstance(stored, dict) and isinstance(answered, dict):
        for name in stored.keys() ^ answered.keys():
            if not at.endswith(VARYING) and not f"{at}.{name}".endswith(VARYING):
                yield f"{at}.{name}"
        for name in stored.keys() & answered.keys():
            yield from differences(stored[name], answered[name], f"{at}.{name}")
    elif isinstance(stored, list) and isinstance(answered, list):
        yield from differences(stored[0], answered[0], f"{at}[0]")
    elif stored != answered:
        yield at


def events(stream: str) -> list[tuple[str, Any]]:
    """The events of a stream; of equal ones in a row only the first, since answers differ in length."""
    found: list[tuple[str, Any]] = []
    for frame in stream.strip().split("\n\n"):
        name, _, data = frame.rpartition("data: ")
        event = (name, data if data == "[DONE]" else shape(json.loads(data)))
        if not found or found[-1] != event:
            found.append(event)
    return found


def test_examples_are_of_the_shapes_the_code_makes(stored: Examples, answered: Examples) -> None:
    assert stored.keys() == answered.keys()
    wrong: list[str] = []
    for name, example in answered.items():
        assert stored[name].keys() == example.keys(), name
        for part in example.keys() & {"request", "response", "error"}:
            told = (shape(stored[name][part]), shape(example[part]))
            wrong += differences(*told, f"{name} {part}")
    assert not wrong, f"{wrong}: record them again with `python -m tools.api_examples`"


def test_streams_are_of_the_shapes_the_code_makes(stored: Examples, answered: Examples) -> None:
    for path in GENERATING:
        told, made = events(stored[f"POST {path}"]["stream"]), events(answered[f"POST {path}"]["stream"])
        assert [name for name, _ in told] == [name for name, _ in made], path
        wrong = [
            difference
            for (name, one), (_, other) in zip(told, made, strict=True)
            for difference in differences(one, other, f"{path} {name.strip()}")
        ]
        assert not wrong, f"{wrong}: record them again with `python -m tools.api_examples`"


def test_every_route_that_generates_and_nearly_every_other_has_an_example(stored: Examples) -> None:
    described = {
        f"{method} {route.path.replace(':path}', '}')}"
        for route in all_routes()
        for method in route.methods
        if route.openapi and method != "HEAD"
    }
    assert stored.keys() <= described
    feeds = {"GET /v1/admin/watch", "POST /v1/admin/traffic"}  # without an end, or as long as many answers
    adapters = {f"POST /v1/{verb}_lora_adapter" for verb in ("load", "unload")}  # of servers with --lora-dir
    vectors = {f"POST {path}" for path in FORMS}  # of models that make them
    fleets = {path for path in described if "/v1/admin/fleet" in path}  # of servers with --replicas
    without = {"GET /openapi.json", "GET /docs", "GET /metrics", *vectors, *feeds, *adapters, *fleets}
    assert described - stored.keys() == without


def test_a_field_that_is_gone_is_noticed(stored: Examples) -> None:
    told = shape(stored["POST /v1/chat/completions"]["response"])
    made = shape(json.loads(json.dumps(stored["POST /v1/chat/completions"]["response"])))
    del made["choices"][0]["finish_reason"]
    assert list(differences(told, made, "chat")) == ["chat.choices[0].finish_reason"]
