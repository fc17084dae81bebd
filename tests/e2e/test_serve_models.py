"""Several models in one real server: routed by name, sharing the device, sleeping and waking."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from tests.adapter_folders import adapter_arrays, write_adapter
from tests.e2e.batch_client import COMPLETIONS, begin, jsonl, request, results, wait
from tests.e2e.client_server import ADMIN, KEY, NARROW_KEY, ClientServer, client_server
from tests.e2e.http_server import Reply
from tests.e2e.model_cli import run, run_process
from tests.e2e.test_serve_adapters import spec_of
from tests.e2e.test_serve_page import messages as feed_messages
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
def several(
    folder: Path, models: list[dict[str, Any]], *, flags: tuple[str, ...] = (), **more: Any
) -> Iterator[SeveralModels]:
    kind = type("Served", (SeveralModels,), {"file": {"models": models, **more}})
    with client_server(folder, *flags, kind=kind, PACELINE_ADMIN_KEY=ADMIN) as server:
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
        check_feeds(server)
        # What a key may have at once counts over all models.
        with server.open("POST", "/v1/completions", endless(), key=NARROW_KEY) as stream:
            stream.readline()
            body = {"model": "right", "prompt": "a", "max_tokens": 1}
            assert server.ask("POST", "/v1/completions", body, key=NARROW_KEY).code == "concurrency_exceeded"
        server.wait_until(server.is_idle)
        assert server.metric("invariant_violations_total") == 0


def check_feeds(server: SeveralModels) -> None:
    """Each model has its feed, and every feed tells of all of them."""
    for name in ("left", "right"):
        (newest,) = feed_messages(server, 1, f"?model={name}")
        assert newest["engine"]["snapshot"]["finished"] >= 9
        assert server.ask("GET", f"/v1/admin/about?model={name}", key=ADMIN).json["model"] == name
        models = newest["server"]["models"]
        assert [(model["name"], model["share"], model["standing"]) for model in models] == [
            ("left", 1, "awake"),
            ("right", 2, "awake"),
        ]
        assert all(model["device_s"] > 0 for model in models)
    assert server.ask("GET", "/v1/admin/about", key=ADMIN).json["model"] == "left"
    assert server.ask("GET", "/v1/admin/watch?model=middle", key=ADMIN).code == "model_not_found"


def test_a_model_sleeps_and_wakes_with_the_same_answer(folders: dict[str, Path], tmp_path: Path) -> None:
    left, right = folders.values()
    log = tmp_path / "left.jsonl"
    with several(tmp_path, [entry(left, run_log=str(log)), entry(right, pinned=True)]) as server:
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
            woken = server.answer("left").json
            assert woken["choices"][0]["text"] == before, "a request wakes it"
            explained = server.ask("GET", f"/v1/requests/{woken['id']}/explain")
            assert b"its model was asleep" in explained.body
            assert server.standing("left") == "awake"
        assert server.rest("left", "sleep", "?level=2").status == 200
        assert server.rest("left", "wake").json["standing"] == "awake"
        assert server.text("left") == before
        server.wait_until(lambda: server.figure("model_wakes_total", "left") == 3)
        assert server.figure("model_sleeps_total", "left") == 3
        assert server.metric("invariant_violations_total") == 0
        server.terminate()
        assert server.process.wait(60) == 0
    again = tmp_path / "again.jsonl"
    done = run("replay", log, "--output", again)
    assert done.returncode == 0, done.stdout + done.stderr
    assert again.read_bytes() == log.read_bytes() and '["sleep",' in log.read_text()


def test_models_with_adapters_and_a_disk_replay_from_a_warm_start(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    spec = spec_of(folders["left"])
    tuned = [
        f"{name}={write_adapter(tmp_path / name, adapter_arrays(spec, seed=seed))}"
        for seed, name in enumerate(("first", "second"), 1)
    ]
    adapters = {"enable_lora": True, "lora_modules": ",".join(tuned), "max_loras": 1}
    logs = {name: tmp_path / f"{name}.jsonl" for name in folders}
    models = [
        entry(
            path,
            kv_disk_dir=str(tmp_path / f"{path.name}-kv"),
            kv_disk_size=1 << 24,
            run_log=str(logs[path.name]),
            **(adapters if path.name == "left" else {}),
        )
        for path in folders.values()
    ]
    texts: dict[str, str] = {}
    for _ in range(2):  # the second finds what the first has written
        with several(tmp_path, models) as server:
            asked = ["left", "right", "first", "second"] * 4
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(partial(server.text, prompt=PROMPT * 6), asked))
            found = dict(zip(asked, answers, strict=True))
            assert len(set(found.values())) == 4 and found == (texts or found)
            texts = found
            server.wait_until(server.is_idle)
            assert server.rest("left", "sleep", "?level=2").status == 200
            assert server.text("left", prompt=PROMPT * 6) == texts["left"], "with what the disk has"
            server.wait_until(server.is_idle)
            server.terminate()
            assert server.process.wait(60) == 0
    for log in logs.values():
        assert '"restored"' in log.read_text()
        assert '["sleep",' in log.read_text() or log is logs["right"]
        again = log.with_suffix(".again")
        done = run("replay", log, "--output", again)
        assert done.returncode == 0, done.stdout + done.stderr
        assert again.read_bytes() == log.read_bytes()
    assert '["adapter",' in logs["left"].read_text()


def test_an_idle_model_sleeps_and_one_makes_room_for_another(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """There is room for one of them at a time."""
    left, right = folders.values()
    models = [entry(left), entry(right)]
    with several(tmp_path, models) as server:
        texts = {name: server.text(name) for name in folders}
        about = server.ask("GET", "/v1/admin/about", key=ADMIN).json["engine"]
    room = int(1.5 * (about["weight_bytes"] + about["kv_bytes"]))
    with several(tmp_path, models, memory_bytes=room) as server:
        assert [server.standing(name) for name in folders] == ["awake", "asleep"]
        for name in ("right", "left", "right"):
            assert server.text(name) == texts[name]
            assert server.standing(name) == "awake"
            other = "left" if name == "right" else "right"
            server.wait_until(lambda other=other: server.standing(other) == "asleep")  # type: ignore[misc]
        with ThreadPoolExecutor(4) as pool:
            asked = ["left", "right"] * 4
            assert list(pool.map(server.text, asked)) == [texts[name] for name in asked]
    with several(tmp_path, [entry(left, idle_sleep_s=0.3, sleep_level=2), entry(right)]) as server:
        server.wait_until(lambda: server.standing("left") == "asleep")
        assert server.standing("right") == "awake"
        assert server.text("left") == texts["left"]


def test_a_model_that_cannot_be_woken_is_unavailable_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    broken = write_models(tmp_path, "broken")["broken"]
    with several(tmp_path, [entry(folders["right"]), entry(broken)]) as server:
        before, text = server.text("broken"), server.text("right")
        assert server.rest("broken", "sleep", "?level=2").status == 200
        (weights,) = broken.glob("*.safetensors")
        kept = weights.read_bytes()
        with weights.open("r+b") as file:  # in place: the file stays open in the engine
            file.seek(-4096, 2)
            file.write(b"\xff" * 4096)
        lost = server.answer("broken")
        assert (lost.status, lost.code) == (503, "model_unavailable")
        assert server.standing("broken") == "failed"
        assert server.answer("broken").status == 503
        assert server.rest("broken", "wake").code == "model_unavailable"
        assert server.text("right") == text and server.standing("right") == "awake"
        with weights.open("r+b") as file:
            file.write(kept)
        assert server.rest("broken", "wake").status == 200
        assert server.text("broken") == before


def test_the_routes_of_vllm_on_a_server_of_one_model(folders: dict[str, Path], tmp_path: Path) -> None:
    with several(tmp_path, [entry(folders["left"])]) as server:
        text = server.text("left")
        assert server.ask("GET", "/is_sleeping").json == {"is_sleeping": False}
        assert server.ask("POST", "/sleep?level=1", key=KEY).status == 403
        assert server.ask("POST", "/sleep?level=1", key=ADMIN).status == 200
        assert server.ask("GET", "/is_sleeping").json == {"is_sleeping": True}
        assert server.ask("POST", "/wake_up", key=ADMIN).status == 200
        assert server.ask("GET", "/is_sleeping").json == {"is_sleeping": False}
        with server.open("POST", "/v1/completions", endless()) as stream:
            stream.readline()
            busy = server.ask("POST", "/sleep", key=ADMIN)
            assert (busy.status, busy.code) == (409, "sleep_refused")
            assert server.ask("POST", "/sleep?level=2&mode=abort", key=ADMIN).status == 200
        assert server.text("left") == text


def test_all_models_come_back_after_the_loss_of_their_engine(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with several(tmp_path, [entry(path) for path in folders.values()]) as server:
        texts = {name: server.text(name) for name in folders}
        assert server.rest("right", "sleep", "?level=2").status == 200
        with server.open("POST", "/v1/completions", endless()) as stream:
            stream.readline()
            children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
            for child in children.split():
                os.kill(int(child), signal.SIGKILL)
            assert b"engine_unavailable" in stream.read()
        server.wait_for(200)
        assert {name: server.text(name) for name in folders} == texts
        assert server.standing("right") == "awake", "a new engine has all its models"


def test_batches_and_estimates_go_to_the_model_they_name(folders: dict[str, Path], tmp_path: Path) -> None:
    kind = ("--batch-dir", str(tmp_path / "batches"))
    with several(tmp_path, [entry(path) for path in folders.values()], flags=kind) as server:
        texts = {name: server.text(name) for name in folders}
        more = {"temperature": 0, "prompt": PROMPT, "max_tokens": 12}
        lines = [
            request(f"{name} {place}", COMPLETIONS, model=name, **more)
            for place in range(3)
            for name in folders
        ]
        client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
        done = wait(client, begin(client, jsonl(*lines), COMPLETIONS).id)
        answers = results(client, done.output_file_id)
        said = {name: line["response"]["body"]["choices"][0]["text"] for name, line in answers.items()}
        assert said == {f"{name} {place}": texts[name] for place in range(3) for name in folders}
        # What is asked of a sleeper has its wake in the forecast.
        asked = {"model": "right", "prompt": PROMPT, "max_tokens": 12}
        awake = server.ask("POST", "/v1/estimate", asked).json
        assert server.rest("right", "sleep", "?level=2").status == 200
        asleep = server.ask("POST", "/v1/estimate", asked).json
        assert server.standing("right") == "asleep", "an estimate wakes nothing"
        assert asleep["ttft_ms"] > awake["ttft_ms"]


def endless() -> dict[str, Any]:
    return {"model": "left", "prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}


BAD_FILES = {
    "models: []": "there must be 1 to 32 models",
    "models: 3": "must hold a list 'models:'",
    "other: 3": "there is no option 'other'",
    "models: [{name: a}]": "say which it is",
    "models: [{model: a, shares: 2}]": "did you mean share?",
    "models: [{model: a, share: 0}]": "--share must be at least 0.001",
    "models: [{model: a, pinned: true, idle_sleep_s: 3}]": "pinned and never sleeps",
    "models: [{model: a, sleep_level: 3}]": "--sleep-level must be at most 2",
    "memory_bytes: much\nmodels: [{model: a}]": "memory_bytes must be a number of bytes",
    "models: [{model: a, kv_disk_dir: x}, {model: b, kv_disk_dir: x}]": "cannot write to one --kv-disk-dir",
    "models: [{model: a, run_log: x.jsonl}, {model: b, run_log: x.jsonl}]": "cannot write to one --run-log",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_of_models_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    listed = tmp_path / "models.yaml"
    listed.write_text(text)
    ended = run("serve", "--models", str(listed))
    assert ended.returncode == 2 and BAD_FILES[text] in ended.stderr, ended.stderr


def test_models_that_cannot_be_served_together(folders: dict[str, Path], tmp_path: Path) -> None:
    left = str(folders["left"])
    same = run("serve", left, left)
    assert same.returncode == 2 and "two models or adapters have the name 'left'" in same.stderr
    named = run("serve", left, str(folders["right"]), "--served-model-name", "one")
    assert named.returncode == 2 and "--served-model-name names one model" in named.stderr
    twice = run("serve", left, str(folders["right"]), "--model", left)
    assert twice.returncode == 2 and "models are given twice" in twice.stderr
    listed = tmp_path / "models.yaml"
    listed.write_text(
        yaml.safe_dump({"memory_bytes": 1000, "models": [entry(path) for path in folders.values()]})
    )
    small = run_process("serve", "--models", str(listed), "--port", "0")
    assert small.returncode == 2 and "give at least" in small.stderr, small.stderr


def test_each_model_has_adapters_under_names_of_their_own(folders: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "adapters"
    for seed, (name, path) in enumerate(folders.items(), 1):
        write_adapter(home / f"for-{name}", adapter_arrays(spec_of(path), seed=seed))
    entries = [entry(path, lora_dir=str(home)) for path in folders.values()]

    def load(name: str, path: str, query: str = "") -> Reply:
        body = {"lora_name": name, "lora_path": path}
        return server.ask("POST", f"/v1/load_lora_adapter{query}", body, key=ADMIN)

    with several(tmp_path, entries) as server:
        assert load("poet", "for-left").json["parent"] == "left"
        assert load("clerk", "for-right", "?model=right").json["parent"] == "right"
        # No adapter takes the name of another model or of its adapters, in place or not.
        for name, query in (("right", ""), ("clerk", ""), ("poet", "?model=right")):
            assert load(name, "for-left", query).code == "invalid_adapter"
        assert load("other", "for-left", "?model=middle").code == "model_not_found"
        texts = {name: server.text(name) for name in ("left", "right", "poet", "clerk")}
        assert len(set(texts.values())) == 4
        gone = server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "clerk"}, key=ADMIN)
        assert gone.status == 200 and server.answer("clerk").status == 404
        assert server.text("poet") == texts["poet"]
