"""Adapters in the API: they are models, requests name them, and an operator loads and unloads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.core.adapter import AdapterInfo
from paceline.errors import InvalidAdapter, UnknownAdapter
from paceline.server.access.caller import Caller
from paceline.server.api.model_routes import service_named
from paceline.server.errors import UnknownModel, UnsupportedRoute, problem_of
from paceline.server.generate.service import Service
from tests.adapter_folders import adapter_arrays, write_adapter
from tests.pure.models.made import config, spec_of
from tests.pure.server_api.api_helpers import Api, FakeClient, chunks, says

CHAT = "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def info(name: str, number: int = 3, identity: str = "ab" * 32) -> AdapterInfo:
    return AdapterInfo(name=name, folder=f"/adapters/{name}", number=number, identity=identity, rank=8)


class LoadingClient(FakeClient):
    """Loads whatever it is asked to."""

    def __init__(self, known: Mapping[str, AdapterInfo]) -> None:
        super().__init__(says("hello"))
        self.adapters: dict[str, AdapterInfo] = dict(known)
        self.loaded: list[tuple[str, str]] = []

    async def load_adapter(self, name: str, folder: str) -> AdapterInfo:
        self.loaded.append((name, folder))
        self.adapters[name] = info(name, 10 + len(self.loaded))
        return self.adapters[name]

    def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise UnknownAdapter(f"there is no adapter {name}", param="lora_name")


def api(*known: AdapterInfo, **settings: Any) -> tuple[Api, LoadingClient]:
    made = Api(**settings)
    client = LoadingClient({each.name: each for each in known})
    made.client = made.service.client = client
    return made, client


def body(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def test_a_request_names_an_adapter_as_its_model() -> None:
    made, client = api(info("poet", 3), info("clerk", 4))
    assert made.ask(CHAT, body("poet"))["model"] == "poet"
    assert made.ask(CHAT, body("clerk"))["model"] == "clerk"
    made.ask(CHAT, body("tiny"))
    assert [each.get("adapter", 0) for each in client.submitted] == [3, 4, 0]
    assert [record.adapter for record in made.listener.records] == ["ab" * 32, "ab" * 32, ""]
    assert chunks(made.stream(CHAT, body("poet")))[0]["model"] == "poet"
    assert made.is_at_rest


def test_a_name_that_is_no_adapter_is_not_found() -> None:
    made, client = api(info("poet"))
    for name in ("Poet", "poet2", "/adapters/poet"):
        with pytest.raises(UnknownModel, match="is not loaded; there is tiny, alias"):
            made.ask(CHAT, body(name))
    client.unload_adapter("poet")
    with pytest.raises(UnknownModel):
        made.ask(CHAT, body("poet"))
    assert not client.submitted


def test_a_receipt_has_the_identity() -> None:
    made, _ = api(info("poet"))
    headers = {"x-paceline-receipt": "true"}
    receipt = made.ask(CHAT, body("poet"), headers=headers)["usage"]["paceline"]
    assert receipt["adapter"] == "ab" * 32
    assert "adapter" not in made.ask(CHAT, body("tiny"), headers=headers)["usage"]["paceline"]


def test_adapters_are_models_with_a_parent() -> None:
    made, _ = api(info("poet"))
    cards = {card["id"]: card for card in made.ask("/v1/models", method="GET")["data"]}
    assert list(cards) == ["tiny", "alias", "poet"]
    assert (cards["tiny"]["parent"], cards["poet"]["parent"], cards["poet"]["root"]) == (None, "tiny", "poet")
    assert cards["poet"]["paceline"]["adapter"] == {"identity": "ab" * 32, "rank": 8}
    assert "adapter" not in cards["tiny"]["paceline"]
    shown = made.ask("/v1/models/{id:path}", method="GET", path={"id": "poet"})
    assert shown == cards["poet"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapters" / "poet", adapter_arrays(spec_of(config())))
    return tmp_path / "adapters"


def test_load_and_unload(root: Path) -> None:
    made, client = api(lora_dir=str(root))
    card = made.ask(LOAD, {"lora_name": "verse", "lora_path": "poet"})
    assert (card["id"], card["parent"]) == ("verse", "tiny")
    assert client.loaded == [("verse", str(root / "poet"))]
    with pytest.raises(InvalidAdapter, match="is loaded; load_inplace replaces it"):
        made.ask(LOAD, {"lora_name": "verse", "lora_path": "poet"})
    made.ask(LOAD, {"lora_name": "verse", "lora_path": "poet", "load_inplace": True})
    assert len(client.loaded) == 2
    assert made.ask(UNLOAD, {"lora_name": "verse", "lora_int_id": 1})["deleted"] is True
    with pytest.raises(UnknownAdapter) as caught:
        made.ask(UNLOAD, {"lora_name": "verse"})
    assert (problem_of(caught.value).status, problem_of(caught.value).code) == (404, "model_not_found")
    assert all(made.routes["POST", route].needs_admin for route in (LOAD, UNLOAD))


@pytest.mark.parametrize(
    ("given", "says_why"),
    [
        ({"lora_name": "tiny", "lora_path": "poet"}, "cannot have the name 'tiny'"),
        ({"lora_name": " ", "lora_path": "poet"}, "cannot have the name"),
        ({"lora_name": "x", "lora_path": "../poet"}, "does not lie below --lora-dir"),
        ({"lora_name": "x", "lora_path": "/etc"}, "does not lie below --lora-dir"),
        ({"lora_name": "x", "lora_path": "none"}, "there is no adapter folder"),
    ],
)
def test_what_is_not_loaded(root: Path, given: dict[str, Any], says_why: str) -> None:
    made, client = api(lora_dir=str(root))
    with pytest.raises(InvalidAdapter, match=says_why) as caught:
        made.ask(LOAD, given)
    assert (problem_of(caught.value).status, problem_of(caught.value).code) == (400, "invalid_adapter")
    assert not client.loaded


def test_without_a_folder_nothing_is_loaded() -> None:
    made, client = api(info("poet"))
    for route, path in ((LOAD, {"lora_path": "poet"}), (UNLOAD, {})):
        with pytest.raises(UnsupportedRoute, match="--lora-dir"):
            made.ask(route, {"lora_name": "poet", **path})
    assert "poet" in client.adapters


def test_a_key_uses_the_adapters_it_may_and_hears_of_no_others() -> None:
    made, client = api(info("poet", 3), info("clerk", 4))
    mine, none, admin = Caller(adapters=frozenset({"poet"})), Caller(adapters=frozenset()), Caller()
    assert made.ask(CHAT, body("poet"), caller=mine)["model"] == "poet"
    made.ask(CHAT, body("tiny"), caller=none)
    made.ask(CHAT, body("clerk"), caller=admin)
    assert [each.get("adapter", 0) for each in client.submitted] == [3, 0, 4]
    for caller, name in ((mine, "clerk"), (none, "poet"), (mine, "nothing")):
        for route, given in (
            (CHAT, body(name)),
            ("/v1/completions", {"model": name, "prompt": "hi"}),
            ("/v1/messages", body(name) | {"max_tokens": 3}),
            ("/v1/responses", {"model": name, "input": "hi"}),
            ("/tokenize", {"model": name, "prompt": "hi"}),
            ("/detokenize", {"model": name, "tokens": [1]}),
        ):
            with pytest.raises(UnknownModel, match=f"the model '{name}' is not loaded; there is tiny, alias"):
                made.ask(route, given, caller=caller)
        with pytest.raises(UnknownModel):
            made.ask("/v1/models/{id:path}", method="GET", path={"id": name}, caller=caller)
    assert len(client.submitted) == 3
    listed = made.ask("/v1/models", method="GET", caller=mine)["data"]
    assert [card["id"] for card in listed] == ["tiny", "alias", "poet"]


def test_of_several_models_an_adapter_of_others_is_as_unknown_as_any_name() -> None:
    first, second = (
        cast(
            Service,
            SimpleNamespace(model=SimpleNamespace(names=(name,)), client=SimpleNamespace(adapters=known)),
        )
        for name, known in (("left", {"poet": None}), ("right", {"clerk": None}))
    )
    services = [first, second]
    mine = Caller(adapters=frozenset({"poet"}))
    assert service_named(services, "poet", mine) is first and service_named(services, "right", mine) is second
    assert service_named(services, "clerk", Caller()) is second
    said = []
    for name in ("clerk", "other"):
        with pytest.raises(UnknownModel) as refused:
            service_named(services, name, mine)
        said.append(str(refused.value).replace(name, "NAME"))
    assert said[0] == said[1]
