"""Several models in one real server: routed by name, sharing the device, sleeping and waking."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.client_server import ADMIN, KEY, ClientServer, client_server
from tests.e2e.http_server import Reply
from tests.model_folder import write_model, write_weights

PROMPT = "once upon a time there was a model"
SIZES = {"max_model_len": 256, "num_blocks": 96, "max_num_seqs": 6}


def write_models(folder: Path, *names: str) -> dict[str, Path]:
    """Models with weights of their own: each has another width, so that none answers as another does."""
    return {
        name: write_weights(write_model(folder / name, intermediate_size=64 + 32 * place))
        for place, name in enumerate(names)
    }


class SeveralModels(ClientServer):
    """A server with the models of a file."""

    file: dict[str, Any]

    def _model_flags(self) -> list[str]:
        flags = super()._model_flags()
        listed = self.folder / "models.yaml"
        listed.write_text(yaml.safe_dump(self.file))
        return ["--models", str(listed), *flags[flags.index("--api-keys-file") :]]

    def answer(self, model: str, **more: Any) -> Reply:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return self.ask("POST", "/v1/completions", body | more)

    def text(self, model: str, **more: Any) -> str:
        reply = self.answer(model, **more)
        assert reply.status == 200, reply.body
        return str(reply.json["choices"][0]["text"])

    def rest(self, model: str, what: str, query: str = "", key: str = ADMIN) -> Reply:
        return self.ask("POST", f"/v1/models/{model}/{what}{query}", key=key)

    def standing(self, model: str) -> str:
        return str(self.ask("GET", f"/v1/models/{model}").json["paceline"]["standing"])

    def figure(self, name: str, model: str) -> float:
        start = f'paceline:{name}{{engine="0",model_name="{model}"}} '
        (line,) = [line for line in self.page().splitlines() if line.startswith(start)]
        return float(line.rsplit(" ", 1)[1])


@contextmanager
def several(folder: Path, models: list[dict[str, Any]], **more: Any) -> Iterator[SeveralModels]:
    kind = type("Served", (SeveralModels,), {"file": {"models": models, **more}})
    with client_server(folder, kind=kind, PACELINE_ADMIN_KEY=ADMIN) as server:
        assert isinstance(server, SeveralModels)
        server.wait_for(200)
        yield server


def entry(path: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(path), "name": path.name, **SIZES, **more}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"), "left", "right")


def test_requests_go_to_the_model_they_name(folders: dict[str, Path], tmp_path: Path) -> None:
    alone = {}
    for name, path in folders.items():
        with several(tmp_path, [entry(path)]) as server:
            alone[name] = server.text(name)
    assert alone["left"] != alone["right"]
    with several(
        tmp_path, [entry(path, share=1 + place) for place, path in enumerate(folders.values())]
    ) as server:
        assert [card["id"] for card in server.ask("GET", "/v1/models").json["data"]] == ["left", "right"]
        assert {name: server.text(name) for name in folders} == alone
        asked = ["left", "right"] * 8
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(server.text, asked)) == [alone[name] for name in asked]
        unnamed = server.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
        assert unnamed.json["model"] == "left"
        missing = server.answer("middle")
        assert (missing.status, missing.code) == (404, "model_not_found")
        assert "left, right" in missing.json["error"]["message"]
        for name in folders:
            assert server.figure("generation_tokens_total", name) >= 9 * 12
            assert server.figure("engine_busy_seconds_total", name) > 0
        explained = server.answer("right").json["id"]
        assert server.ask("GET", f"/v1/requests/{explained}/explain").status == 200
        server.wait_until(server.is_idle)
        assert server.metric("invariant_violations_total") == 0


def test_a_model_sleeps_and_wakes_with_the_same_answer(folders: dict[str, Path], tmp_path: Path) -> None:
    left, right = folders.values()
    with several(tmp_path, [entry(left), entry(right, pinned=True)]) as server:
        before = server.text("left")
        assert server.rest("left", "sleep", key=KEY).status == 403
        assert server.rest("left", "sleep", key="").status == 401
        assert server.rest("middle", "sleep").code == "model_not_found"
        pinned = server.rest("right", "sleep")
        assert (pinned.status, pinned.code) == (409, "sleep_refused")
        assert server.rest("left", "sleep", "?level=3").status == 400
        for level in (1, 2):
            slept = server.rest("left", "sleep", f"?level={level}")
            assert (slept.status, slept.json["standing"]) == (200, "asleep")
            assert server.standing("left") == "asleep" and server.standing("right") == "awake"
            assert server.text("right")
            assert server.standing("left") == "asleep", "requests for others do not wake it"
            assert server.text("left") == before, "a request wakes it"
            assert server.standing("left") == "awake"
        assert server.rest("left", "sleep", "?level=2").status == 200
        assert server.rest("left", "wake").json["standing"] == "awake"
        assert server.text("left") == before
        server.wait_until(lambda: server.figure("model_wakes_total", "left") == 3)
        assert server.figure("model_sleeps_total", "left") == 3
        assert server.metric("invariant_violations_total") == 0
