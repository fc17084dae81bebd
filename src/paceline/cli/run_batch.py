"""`paceline run-batch`: a file of OpenAI requests in, a file of responses out.

Owns the command line, the progress shown and the summary; what happens to a line is in `batch_run`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.model_options import BATCH, ENGINE, MODEL, engine_options, seed_panel
from paceline.cli.options import Flag, Panel, add_command
from paceline.config import option
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.cli.batch_files import ResultFile

HELP = """
Answer a file of requests in the OpenAI batch format.

\b
  paceline run-batch requests.jsonl results.jsonl
  paceline run-batch -i requests.jsonl -o results.jsonl --model org/model

A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body": {...}}.
Results are written in the order they finish. A request that fails gets a result with an error, and the command exits
with 1. Run the same command again after a crash or Ctrl-C: lines that have a result are skipped.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What `paceline run-batch` takes beside the model's options."""

    source: str | None = option(None, "file with a request on each line", kind=str)
    target: str | None = option(None, "file the results are appended to", kind=str)
    input_file: str | None = option(None, "same as INPUT", kind=str, basic=True)
    output_file: str | None = option(None, "same as OUTPUT", kind=str, basic=True)
    served_model_name: tuple[str, ...] | None = option(
        None, "model name in requests; can be given several times", kind=tuple, basic=True
    )


PANELS = (
    Panel(
        title="Files",
        config=BatchOptions,
        flags=(
            Flag(name="source", metavar="INPUT", is_argument=True),
            Flag(name="target", metavar="OUTPUT", is_argument=True),
            Flag(name="input_file", also=("-i",), metavar="INPUT"),
            Flag(name="output_file", also=("-o",), metavar="OUTPUT"),
            Flag(name="served_model_name", metavar="NAME", default="name of --model"),
        ),
    ),
    MODEL,
    seed_panel("0"),
    *ENGINE,
    BATCH,
)


def add_run_batch(app: typer.Typer) -> None:
    add_command(app, "run-batch", _run_batch, PANELS, HELP)


def _run_batch(values: Mapping[str, Any]) -> None:
    engine = engine_options(values)
    source = _path(values, "source", "input_file", "-i")
    target = _path(values, "target", "output_file", "-o")
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError("the results would be written into the file of the requests; give another file")

    from paceline.cli.batch_files import ResultFile, read_lines

    total = sum(1 for _ in read_lines(source))
    with ResultFile(target) as results:
        try:
            progress = _run_lines(engine, _names(values), source, results, total)
        except KeyboardInterrupt:
            print("Stopped; the same command again goes on where it was.", file=sys.stderr)
            raise
    print(progress.summary(), file=sys.stderr)


def _run_lines(
    engine: Mapping[str, Any], names: tuple[str, ...], source: Path, results: ResultFile, total: int
) -> BatchProgress:
    from paceline.cli.batch_files import read_lines
    from paceline.cli.batch_run import BatchRun
    from paceline.llm.frontend import Frontend

    front = Frontend(None, engine, interactive=False)
    progress = BatchProgress(total)
    try:
        BatchRun(front, names, results, progress).run(read_lines(source))
    finally:
        progress.close()
    return progress


def _path(values: Mapping[str, Any], place: str, name: str, flag: str) -> Path:
    given = [values[key] for key in (place, name) if values[key] is not None]
    if len(given) != 1:
        problem = "twice" if given else "nowhere"
        what = "input" if place == "source" else "output"
        raise InputError(f"the {what} file is given {problem}; give it once, by its place or with {flag}")
    return Path(given[0])


def _names(values: Mapping[str, Any]) -> tuple[str, ...]:
    """What requests may call the model."""
    from paceline.checkpoint.default_model import DEFAULT_MODEL, DEFAULT_NAME

    if values["served_model_name"]:
        return tuple(values["served_model_name"])
    model = values["model"]
    if model is None or model == DEFAULT_NAME:
        return (DEFAULT_NAME, DEFAULT_MODEL.file_name.split(".")[0])
    return tuple(dict.fromkeys((model, Path(model).name, Path(model).stem)))


class BatchProgress:
    """Counts what happens, and shows it where somebody looks."""

    def __init__(self, total: int) -> None:
        self._num_answered = self._num_failed = self._num_skipped = 0
        self._num_input = self._num_output = 0
        self._started_s = time.perf_counter()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="Requests", unit="req", dynamic_ncols=True)

    def on_result(self, status: int, num_input: int, num_output: int) -> None:
        if status == 200:
            self._num_answered += 1
        else:
            self._num_failed += 1
        self._num_input += num_input
        self._num_output += num_output
        self._advance()

    def on_skipped(self) -> None:
        self._num_skipped += 1
        self._advance()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def summary(self) -> str:
        skipped = f", {self._num_skipped} done before" if self._num_skipped else ""
        return f"{self._num_answered} answered, {self._num_failed} failed{skipped}; {self._rates()}"

    def _advance(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(1)

    def _rates(self) -> str:
        seconds = max(time.perf_counter() - self._started_s, 1e-9)
        return f"{self._num_input / seconds:.1f} tokens/s in, {self._num_output / seconds:.1f} tokens/s out"
