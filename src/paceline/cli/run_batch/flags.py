"""`paceline run-batch`: a file of OpenAI requests in, a file of responses out.

Owns the command line and the summary; what happens to a line is in `run`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.cli.command import Command
from paceline.cli.flags import engine_options, find_model
from paceline.config.options import option
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.cli.run_batch.run import BatchProgress, ResultFile

MOST_NAMED = 10  # failed lines in a message
HELP = """
Answer a file of requests in the OpenAI batch format.

  paceline run-batch requests.jsonl results.jsonl
  paceline run-batch -i requests.jsonl -o results.jsonl --model org/model

A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}; other
urls are /v1/completions and, where the model makes vectors, /v1/embeddings, /v1/rerank and /v1/score.
Results are written in the order they finish. A request that fails gets a result with an error, and the command exits
with 1. Run the same command again after a crash or Ctrl-C: lines that have a result are skipped.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What `paceline run-batch` takes beside the model's options."""

    PANEL: ClassVar = "Files"

    source: str | None = option(None, "file with a request on each line", argument=True, metavar="INPUT")
    target: str | None = option(None, "file the results are appended to", argument=True, metavar="OUTPUT")
    input_file: str | None = option(None, "same as INPUT", basic=True, also=("-i",), metavar="INPUT")
    output_file: str | None = option(None, "same as OUTPUT", basic=True, also=("-o",), metavar="OUTPUT")
    served_model_name: tuple[str, ...] | None = option(
        None,
        "model name in requests; can be given several times",
        kind=tuple,
        basic=True,
        metavar="NAME",
        default_text="name of --model",
    )


def _run_batch(values: Mapping[str, Any]) -> None:
    engine = engine_options(values)
    source = _path(values, "source", "input_file", "-i")
    target = _path(values, "target", "output_file", "-o")
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError("the results would be written into the file of the requests; give another file")

    from paceline.cli.run_batch.run import BatchProgress, ResultFile, read_lines

    with ResultFile(target) as results:
        lines = [line.earlier_status for line in results.match(read_lines(source))]
        progress = BatchProgress(len(lines))
        try:
            if None in lines:
                find_model(engine)
                _run_lines(engine, _names(values), source, results, progress)
            else:  # nothing is left to do, and no model is needed to say so
                for line in results.match(read_lines(source)):
                    progress.on_skipped(line)
        except KeyboardInterrupt:
            print("Stopped; run the same command again to continue.", file=sys.stderr)
            raise
        finally:
            progress.close()
    print(progress.summary(), file=sys.stderr)
    if progress.failed:
        print(f"{_failures(progress.failed)}; see the errors in {target}", file=sys.stderr)
        raise SystemExit(1)


def _run_lines(
    engine: Mapping[str, Any],
    names: tuple[str, ...],
    source: Path,
    results: ResultFile,
    progress: BatchProgress,
) -> None:
    from paceline.cli.run_batch.run import BatchRun, read_lines
    from paceline.llm.frontend import Frontend

    front = Frontend(None, engine, interactive=False)
    progress.start()
    BatchRun(front, names, results, progress).run(results.match(read_lines(source)))


def _failures(numbers: Sequence[int]) -> str:
    """How many requests failed, and on which lines of the input."""
    count = len(numbers)
    shown = ", ".join(str(number) for number in sorted(numbers)[:MOST_NAMED])
    more = f" and {count - MOST_NAMED:,} more" if count > MOST_NAMED else ""
    return f"{count:,} request{'s' * (count != 1)} failed (input line{'s' * (count != 1)} {shown}{more})"


def _path(values: Mapping[str, Any], place: str, name: str, flag: str) -> Path:
    given = [values[key] for key in (place, name) if values[key] is not None]
    if len(given) != 1:
        problem = "twice" if given else "nowhere"
        what = "input" if place == "source" else "output"
        raise InputError(f"the {what} file is given {problem}; give it once, by its place or with {flag}")
    return Path(given[0])


def _names(values: Mapping[str, Any]) -> tuple[str, ...]:
    """What requests may call the model."""
    from paceline.models.files.fetch import packaged_named

    if values["served_model_name"]:
        return tuple(values["served_model_name"])
    model = values["model"]
    packaged = packaged_named(model)
    if packaged is not None:
        return (packaged.name, packaged.title)
    return tuple(dict.fromkeys((model, Path(model).name, Path(model).stem)))


RUN_BATCH = Command(
    name="run-batch",
    help=HELP,
    run=_run_batch,
    takes=(BatchOptions, "Model", "Sampling", "KV cache", "Step size", "Pictures"),
)
