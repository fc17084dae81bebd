"""`paceline pull | ls | show | rm` as a user sees them, on models made here."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.cli.command import CommandGroup
from paceline.cli.models import MODELS
from paceline.cli.serve.run import run_server
from paceline.config.server import ProcessConfig, ServerConfig
from paceline.errors import InputError
from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.fetch import DEFAULT_MODEL, HubName, bring_here
from tests.pure.models.made import Gguf, arrays_for, config, gguf_fields, renamed, spec_of, write_folder

Run = Callable[..., "Result"]
ROOT = CommandGroup(name="paceline", help="", headings={"Models": MODELS})


class Result(NamedTuple):
    exit_code: int
    output: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line with empty caches; errors come out as they are."""
    monkeypatch.setenv("PACELINE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda cache: _no_cache())

    def run(*arguments: str, answer: str = "") -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        code = 0
        try:
            ROOT.call(arguments, "paceline")
        except SystemExit as end:
            code = int(end.code or 0)
        return Result(code, capsys.readouterr().out)

    return run


@pytest.mark.parametrize("command", [("run", "-m", "nosuch", "hi"), ("chat", "-m", "./nosuch", "-q", "hi")])
def test_a_name_that_is_no_model_is_said_before_torch_is_imported(command: tuple[str, ...]) -> None:
    code = (
        "import sys; from paceline.cli.main import PACELINE\n"
        "from paceline.errors import InputError\n"
        f"try: PACELINE.call({list(command)!r}, 'paceline')\n"
        "except InputError as error: print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "nosuch" in done.stdout and done.stdout.endswith(" False\n"), done.stdout


def test_a_server_says_so_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.cli.serve.run._start_engines", lambda count: pytest.fail("an engine is started")
    )
    with pytest.raises(CheckpointError, match="'nosuch' is not a model"):
        run_server(ServerConfig(), ProcessConfig(), {"model": "nosuch"})


def test_the_engine_is_started_before_the_server_is_imported() -> None:
    code = (
        "import sys; from paceline.cli.main import PACELINE\n"
        "from paceline.cli.serve import run as serve_run\n"
        "serve_run._start_engines = lambda count: sys.exit(str({'numpy', 'jinja2', 'uvloop'} & set(sys.modules)))\n"
        "PACELINE.call(['serve'], 'paceline')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("set()\n"), done.stderr


def test_the_hub_is_asked_only_where_the_cache_has_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def fetch(name: HubName, *, local_only: bool, **options: object) -> Path:
        asked.append(local_only)
        if local_only and name.repository == "org/new":
            raise CheckpointError("it is not in the cache")
        return Path("x")

    monkeypatch.setattr("paceline.models.files.fetch.fetch_from_hub", fetch)
    bring_here("org/known")
    assert asked == [True]
    bring_here("org/new")
    assert asked == [True, True, False]


def _no_cache() -> None:
    from huggingface_hub.errors import CacheNotFound

    raise CacheNotFound("none", cache_dir="none")


@pytest.fixture
def default(tmp_path: Path) -> Path:
    """A small file in the default model's place. It is too small to be taken for it, but it is kept here."""
    spec = spec_of(config(tie_word_embeddings=True))
    path = tmp_path / "cache" / "models" / DEFAULT_MODEL.file_name
    path.parent.mkdir(parents=True)
    fields = gguf_fields("llama", spec) | {"tokenizer.chat_template": "x"}
    path.write_bytes(Gguf(fields=fields, arrays=renamed(arrays_for(spec), spec, interleave=True)).build())
    return path


def test_nothing_is_here_at_first(run: Run) -> None:
    assert run("ls").output == "No models here; paceline pull fetches the default one.\n"
    with pytest.raises(
        CheckpointError, match="the default model is not in .*; fetch it with: paceline pull smollm2"
    ):
        run("show")
    with pytest.raises(CheckpointError, match="'smollm2' is not among the models kept here: none"):
        run("rm", "smollm2")


def test_what_is_here_is_listed(run: Run, default: Path) -> None:
    size = default.stat().st_size / 1000
    assert run("ls").output == f"smollm2    {size:.1f} kB  {default}\n"


def test_pull_checks_what_it_got(run: Run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", config())
    assert run("pull", str(folder)).output == f"{folder}\n"
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="too short"):
        run("pull", str(folder))


def test_show_describes_a_file_by_its_headers(run: Run, default: Path) -> None:
    lines = dict(line.split("  ", 1) for line in run("show", str(default)).output.splitlines())
    shown = {label: text.strip() for label, text in lines.items()}
    assert shown["path"] == str(default) and shown["format"] == "gguf" and shown["architecture"] == "llama"
    assert shown["layers"] == "2" and shown["heads"] == "4, 2 for keys and values, of 4"
    assert shown["vocabulary"] == "24, tied to the output" and shown["context"] == "64 tokens"
    assert shown["chat template"] == "yes" and shown["tokenizer"] == "yes"
    assert shown["weights"].endswith("F32 15.7 kB in 20")


def test_show_tells_windows_and_experts(run: Run, tmp_path: Path) -> None:
    values = config("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    output = run("show", str(write_folder(tmp_path / "model", values))).output
    assert "2, 2 of them with a window of 16 tokens" in output
    assert "4, 2 for each token, of 20, in 2 layers" in output


def test_rm_asks(run: Run, default: Path) -> None:
    refused = run("rm", "smollm2", answer="n\n")
    assert refused.exit_code == 1 and refused.output.endswith("Kept.\n") and default.exists()
    with pytest.raises(InputError, match="there is no terminal to confirm on; give --yes"):
        run("rm", "smollm2", answer="")
    assert default.exists()
    agreed = run("rm", "smollm2", answer="y\n")
    assert agreed.exit_code == 0 and "Removed smollm2" in agreed.output and not default.exists()


def test_rm_does_not_ask_when_told_not_to(run: Run, default: Path) -> None:
    assert run("rm", "--yes", "smollm2").exit_code == 0 and not default.exists()


def test_rm_takes_no_paths(run: Run, default: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"x")
    for name in (str(tmp_path / "mine.gguf"), f"{default.parent}/../../mine.gguf", "../mine.gguf"):
        with pytest.raises(CheckpointError, match="is not among the models kept here"):
            run("rm", "--yes", name)
    assert (tmp_path / "mine.gguf").exists()
