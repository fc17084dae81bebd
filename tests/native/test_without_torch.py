"""Serving on a CPU in an environment without torch, and what a warm start loads where torch is installed."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.client_server import ClientServer, client_server, keys_file
from tests.e2e.media.picture_server import CHAT, MODEL, PART, TEXT, chat
from tests.e2e.model_cli import TINY, environment
from tests.kernels import CACHE, host_code
from tests.model_folder import write_model
from tests.pictures import encoded, picture
from tests.vision_folder import write_deep_model, write_patch_model, write_tile_model

HIDDEN = ("torch", "functorch", "triton", "transformers")
GENERATE = """
import sys
from paceline import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", num_blocks=64)
sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8, seed=1)
outputs = llm.generate(["a", "bc"], sampling, use_tqdm=False)
print([len(output.outputs[0].token_ids) for output in outputs])
print([name for name in ("torch", "numba") if name in sys.modules])
"""
LOOK = """
import sys
from paceline import LLM, SamplingParams
if sys.argv[3]:  # as where the extra is not installed
    sys.modules["PIL"] = None
content = [{"type": "image", "image": sys.argv[2]}, {"type": "text", "text": "What is it?"}]
with LLM(sys.argv[1], load_format="dummy", num_blocks=600) as llm:
    print(llm.loaded.notices)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    try:
        (output,) = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
        print(len(output.outputs[0].token_ids), output.num_image_tokens)
    except Exception as error:
        print(error)
    print([name for name in ("torch", "numba") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    host_code()  # compiled, if nothing has done it yet
    return tmp_path_factory.mktemp("light")


@pytest.fixture(scope="module")
def light_python(folder: Path) -> Path:
    """An interpreter with everything that this one has, but torch and what needs it."""
    packages = folder / "packages"
    packages.mkdir()
    for path in map(Path, sys.path):
        for entry in path.iterdir() if path.name == "site-packages" else ():
            if not entry.name.startswith((*HIDDEN, "_", "nvidia")) and entry.suffix != ".pth":
                (packages / entry.name).symlink_to(entry)
    venv.create(folder / "venv", with_pip=False)
    (own,) = (folder / "venv").glob("lib/python*/site-packages")
    sources = Path(__file__).resolve().parents[2] / "src"
    (own / "light.pth").write_text(f"{packages}\n{sources}\n")
    return folder / "venv/bin/python"


def run(*command: object, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env=environment(cache),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_llm_generates_and_commands_answer(folder: Path, light_python: Path) -> None:
    assert run(light_python, "-c", "import torch", cache=folder).returncode == 1
    model = write_model(folder / "model")
    done = run(light_python, "-c", GENERATE, model, cache=folder)
    assert done.stdout.splitlines() == ["[8, 8]", "[]"], done.stderr
    command = [light_python, "-m", "paceline"]
    done = run(*command, "chat", "--model", model, *TINY, "-q", "hi", "--max-tokens", "4", cache=folder)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    asked = folder / "requests.jsonl"
    body = {"prompt": "a", "max_tokens": 3, "model": str(model)}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    asked.write_text(json.dumps(line))
    done = run(
        *(*command, "run-batch", "-i", asked, "-o", folder / "answers.jsonl"),
        *("--model", model, "--load-format", "dummy"),
        cache=folder,
    )
    assert done.returncode == 0, done.stderr
    (answer,) = (folder / "answers.jsonl").read_text().splitlines()
    assert json.loads(answer)["response"]["status_code"] == 200


@pytest.mark.parametrize("flags", [("--cpu-backend", "torch"), ("--block-size", "8")])
def test_what_needs_torch_says_how_to_install_it(
    folder: Path, light_python: Path, flags: tuple[str, ...]
) -> None:
    model = write_model(folder / "model")
    done = run(
        light_python, "-m", "paceline", "chat", "--model", model, *TINY, "-q", "hi", *flags, cache=folder
    )
    assert done.returncode == 2 and "pip install 'paceline[torch]'" in done.stderr, done.stderr


def test_a_server_streams_and_loads_neither_torch_nor_numba(folder: Path) -> None:
    """In an environment that has both; and nothing is compiled."""
    kept = sorted(CACHE.iterdir())
    with client_server(folder) as server:
        server.wait_for(200)
        streamed = server.complete(prompt="hello", max_tokens=6, stream=True, ignore_eos=True)
        assert streamed.status == 200 and streamed.body.count(b"data: ") >= 2
        mapped = [name for pid in _processes(server) for name in _libraries(pid)]
        assert any("llvmlite" in name for name in mapped)
        assert not [name for name in mapped if "-packages/torch/" in name or "-packages/numba/" in name]
    assert sorted(CACHE.iterdir()) == kept


@pytest.mark.parametrize(
    "write, tokens", [(write_tile_model, 36), (write_patch_model, 6), (write_deep_model, 6)]
)
def test_a_picture_is_answered_without_torch_and_needs_the_extra_vision(
    folder: Path, light_python: Path, write: Callable[[Path], Path], tokens: int
) -> None:
    model, file = write(folder / write.__name__), folder / "a.png"
    file.write_bytes(encoded(picture(64, 32)))
    done = run(light_python, "-c", LOOK, model, file, "", cache=folder)
    assert done.stdout.splitlines() == ["()", f"6 {tokens}", "[]"], done.stderr
    done = run(light_python, "-c", LOOK, model, file, "hide", cache=folder)
    notices, said, loaded = done.stdout.splitlines()
    assert "pip install 'paceline[vision]'" in said and "torch" not in said, done.stderr
    assert notices == "()" and loaded == "[]"


class SeeingServer(ClientServer):
    def _model_flags(self) -> list[str]:
        named = ["--load-format", "dummy", "--served-model-name", MODEL]
        keys = keys_file(self.folder / "keys")
        return [str(write_tile_model(self.folder / MODEL)), *named, "--api-keys-file", str(keys)]


def test_a_server_answers_a_picture_and_loads_neither_torch_nor_numba(folder: Path) -> None:
    """In an environment that has both; and nothing is compiled."""
    kept = sorted(CACHE.iterdir())
    (folder / "pictures").mkdir()
    server = SeeingServer(folder / "pictures")
    try:
        server.wait_for(200)
        reply = server.ask("POST", CHAT, chat(PART, TEXT))
        assert reply.status == 200
        assert reply.json["usage"]["prompt_tokens_details"]["image_tokens"] == 36
        mapped = [name for pid in _processes(server) for name in _libraries(pid)]
        assert not [name for name in mapped if "-packages/torch/" in name or "-packages/numba/" in name]
        assert "torch" not in server.log()
    finally:
        server.close()
    assert sorted(CACHE.iterdir()) == kept


def _processes(server: ClientServer) -> list[int]:
    """The server and what it has started."""
    own = server.process.pid
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    return [own, *map(int, children)]


def _libraries(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
