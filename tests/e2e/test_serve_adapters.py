"""Adapters of a real server: loaded, named, replaced and unloaded while it serves, and over the loss of its engine."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.models.files.hf_config import spec_from_config
from paceline.models.spec import ModelSpec
from tests.adapter_folders import adapter_arrays, write_adapter
from tests.e2e.client_server import ADMIN, KEY, MODEL, ClientServer, client_server
from tests.e2e.http_server import Reply
from tests.e2e.model_cli import run

pytest.importorskip("torch", reason="the reference step computes adapters")
RECEIPT = {"x-paceline-receipt": "true"}
SMALL = ("--max-model-len", "256", "--num-gpu-blocks-override", "64", "--max-num-seqs", "6")


class Served:
    """A server with a folder of adapters; it began with one called `first`."""

    def __init__(self, server: ClientServer, home: Path, spec: ModelSpec) -> None:
        self.server, self.home, self.spec = server, home, spec

    def write(self, name: str, seed: int, **config: Any) -> None:
        write_adapter(self.home / name, adapter_arrays(self.spec, seed=seed), **config)

    def load(self, name: str, path: str, *, key: str = ADMIN, **more: Any) -> Reply:
        body = {"lora_name": name, "lora_path": path, **more}
        return self.server.ask("POST", "/v1/load_lora_adapter", body, key=key)

    def unload(self, name: str, key: str = ADMIN) -> Reply:
        return self.server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, key=key)

    def complete(self, model: str, **more: Any) -> Reply:
        body = {"model": model, "prompt": "once upon a time there was a model", "max_tokens": 12}
        body |= {"temperature": 0, "ignore_eos": True, **more}
        return self.server.ask("POST", "/v1/completions", body, **RECEIPT)

    def text(self, model: str, **more: Any) -> str:
        reply = self.complete(model, **more)
        assert reply.status == 200, reply.body
        return str(reply.json["choices"][0]["text"])

    def models(self) -> list[str]:
        return [card["id"] for card in self.server.ask("GET", "/v1/models").json["data"]]


def spec_of(folder: Path) -> ModelSpec:
    return spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")


def started(folder: Path, *flags: str) -> Any:
    from tests.model_folder import write_model

    spec = spec_of(write_model(folder / "like"))
    home = folder / "adapters"
    first = write_adapter(home / "first", adapter_arrays(spec, seed=1))
    adapters = ("--lora-dir", str(home), "--lora-modules", f"first={first}")
    return client_server(folder, *SMALL, *adapters, *flags, PACELINE_ADMIN_KEY=ADMIN), home, spec


def test_adapters_come_and_go_while_it_serves(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    starting, home, spec = started(tmp_path, "--run-log", str(log))
    with starting as server:
        served = Served(server, home, spec)
        server.wait_for(200)
        plain, first = served.text(MODEL), served.text("first")
        assert plain != first
        for seed, name in enumerate(("second", "third"), 2):
            served.write(name, seed)
            assert served.load(name, name).status == 200
        assert served.models() == [MODEL, "first", "second", "third"]
        texts = {name: served.text(name) for name in served.models()}
        assert len(set(texts.values())) == 4 and (texts[MODEL], texts["first"]) == (plain, first)
        cached = [served.complete(name).json["usage"]["paceline"] for name in texts]
        assert all(each["prompt_tokens_cached"] for each in cached), "each hits what it computed before"
        assert len({each.get("adapter") for each in cached}) == 4

        # Many at once: everyone gets its own adapter's text.
        asked = list(texts) * 6
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(served.text, asked)) == [texts[name] for name in asked]

        # In place: a new identity, nothing of the old one's prefixes.
        served.write("second", 9)
        assert served.load("second", "second").code == "invalid_adapter"
        assert served.load("second", "second", load_inplace=True).status == 200
        changed = served.complete("second").json
        assert changed["choices"][0]["text"] not in texts.values()
        assert changed["usage"]["paceline"]["prompt_tokens_cached"] == 0

        # Unloaded: gone for new requests; those under way end with it.
        with ThreadPoolExecutor(2) as pool:
            long = pool.submit(served.complete, "third", max_tokens=150)
            server.wait_until(server.is_running)
            assert served.unload("third").status == 200
            answer = long.result().json
        assert answer["usage"]["completion_tokens"] == 150
        assert answer["choices"][0]["text"].startswith(texts["third"])
        gone = served.complete("third")
        assert (gone.status, gone.code) == (404, "model_not_found")
        assert served.unload("third").code == "model_not_found"
        assert served.models() == [MODEL, "first", "second"]
        assert served.text(MODEL) == plain
        server.wait_until(server.is_idle)
        server.terminate()
        assert server.process.wait(60) == 0
    check_log(log)


def test_more_adapters_than_places(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    starting, home, spec = started(tmp_path, "--max-loras", "1", "--run-log", str(log))
    with starting as server:
        served = Served(server, home, spec)
        server.wait_for(200)
        for seed, name in enumerate(("second", "third"), 2):
            served.write(name, seed)
            assert served.load(name, name).status == 200
        texts = {name: served.text(name) for name in served.models()}
        assert len(set(texts.values())) == 4
        asked = list(texts) * 5
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(served.text, asked)) == [texts[name] for name in asked]
        page = server.ask("GET", "/metrics").body.decode()
        figures = dict(re.findall(r"^paceline:(adapters\w*)\{[^}]*\} (\S+)$", page, re.M))
        assert float(figures["adapters"]) == 3 and float(figures["adapters_resident"]) <= 1
        assert float(figures["adapters_read_total"]) > 3 and float(figures["adapters_evicted_total"]) > 3
        assert 'max_lora="1"' in page
        server.wait_until(server.is_idle)
        server.terminate()
        assert server.process.wait(60) == 0
    again = log.with_name("again.jsonl")
    done = run("replay", log, "--output", again)
    assert done.returncode == 0, done.stdout + done.stderr
    assert again.read_bytes() == log.read_bytes()


def check_log(log: Path) -> None:
    """The run log has the identities, and replays byte for byte."""
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    inputs = [entry for line in lines for entry in line.get("inputs", ())]
    named = [(entry[2], bool(entry[3])) for entry in inputs if entry[0] == "adapter"]
    assert named[:4] == [(1, True), (2, True), (3, True), (4, True)]
    assert sorted(named[4:]) == [(2, False), (3, False)], "let go of once no row had them"
    of_requests = Counter(entry[2].get("adapter", 0) for entry in inputs if entry[0] == "add")
    assert set(of_requests) == {0, 1, 2, 3, 4}
    again = log.with_name("again.jsonl")
    done = run("replay", log, "--output", again)
    assert done.returncode == 0, done.stdout + done.stderr
    assert again.read_bytes() == log.read_bytes()


def test_what_is_refused_leaves_everything_as_it_was(tmp_path: Path) -> None:
    starting, home, spec = started(tmp_path)
    arrays = adapter_arrays(spec, seed=3)
    name_a = next(iter(arrays))
    write_adapter(home / "rank", adapter_arrays(spec, rank=32), rank=32)
    write_adapter(home / "wrong-rank", arrays, rank=8)
    write_adapter(home / "shape", arrays | {name_a: np.zeros((4, 63), np.float32)})
    write_adapter(home / "strange", arrays | {"base_model.model.other.weight": np.zeros(4, np.float32)})
    write_adapter(home / "nan", arrays | {name_a: np.full_like(arrays[name_a], np.nan)})
    write_adapter(home / "dora", arrays, use_dora=True)
    write_adapter(home / "bias", arrays, bias="all")
    write_adapter(home / "saved", arrays, modules_to_save=["lm_head"])
    (write_adapter(home / "half", arrays) / "adapter_model.safetensors").unlink()
    pickled = write_adapter(home / "pickled", arrays) / "adapter_model.safetensors"
    pickled.rename(pickled.with_name("adapter_model.bin"))
    write_adapter(tmp_path / "outside", arrays)
    (home / "link").symlink_to(tmp_path / "outside")
    with starting as server:
        served = Served(server, home, spec)
        server.wait_for(200)
        canary = served.text(MODEL), served.text("first")
        bad = ("rank", "wrong-rank", "shape", "strange", "nan", "dora", "bias", "saved", "half", "pickled")
        for path in (*bad, "link", "../outside", str(tmp_path / "outside"), "none", "a\0b"):
            reply = served.load("x", path)
            assert (reply.status, reply.code) == (400, "invalid_adapter"), path
            assert reply.json["error"]["param"] == "lora_path"
        for name in (MODEL, "first"):
            assert served.load(name, "first").code == "invalid_adapter"
        for body in ({}, {"lora_name": "x"}, {"lora_name": 5, "lora_path": "first"}, {"lora_path": "first"}):
            reply = server.ask("POST", "/v1/load_lora_adapter", body, key=ADMIN)
            assert (reply.status, reply.code) == (400, "invalid_value")
        for key, status in ((KEY, 403), ("", 401), ("wrong", 401)):
            assert served.load("x", "first", key=key).status == status
            assert served.unload("first", key=key).status == status
        assert served.models() == [MODEL, "first"]
        assert (served.text(MODEL), served.text("first")) == canary


def test_an_engine_in_the_place_of_another_has_the_adapters(tmp_path: Path) -> None:
    starting, home, spec = started(tmp_path)
    with starting as server:
        served = Served(server, home, spec)
        server.wait_for(200)
        for seed, name in enumerate(("second", "third"), 2):
            served.write(name, seed)
            assert served.load(name, name).status == 200
        before = {name: served.text(name) for name in (MODEL, "first", "second")}
        served.write("third", 8)  # it is not what was loaded any more
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)
        server.wait_for(503)
        server.wait_for(200)
        server.wait_until(lambda: "third" not in served.models())
        assert {name: served.text(name) for name in before} == before
        assert served.complete("third").code == "model_not_found"
        assert "has changed since it was loaded" in server.log()


def test_a_server_without_a_folder_loads_nothing(tmp_path: Path) -> None:
    with client_server(tmp_path, *SMALL, PACELINE_ADMIN_KEY=ADMIN) as server:
        server.wait_for(200)
        reply = server.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}, key=ADMIN)
        assert (reply.status, reply.code) == (404, "unsupported_route")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--lora-modules", "a"), "--lora-modules must be NAME=FOLDER"),
        (("--lora-modules", "a=/nowhere"), "--lora-modules a: /nowhere: is not a folder"),
        (("--lora-modules", f"{MODEL}=/nowhere"), "is the name of the model"),
        (("--lora-dir", "/nowhere"), "--lora-dir /nowhere: there is no such folder"),
        (("--enable-lora", "--max-loras", "2", "--mode", "static"), "--max-loras needs --mode continuous"),
    ],
)
def test_a_start_that_cannot_be(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    server = ClientServer(tmp_path, *SMALL, *flags)
    try:
        assert server.process.wait(60) == 2
        assert says in server.log()
    finally:
        server.close()
