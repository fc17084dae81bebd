"""The `paceline` command and its edge: every error meant for users becomes one line and an exit code.

Owns the application, `--version` and what happens to errors. Commands live in files of their own and import
what is heavy only when they run, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, NoReturn

import typer

from paceline.cli.audit import add_audit
from paceline.cli.bench.flags import add_bench
from paceline.cli.chat.run import add_chat
from paceline.cli.completion import ASK, add_completion, complete
from paceline.cli.demo.run import add_demo
from paceline.cli.doctor import add_doctor
from paceline.cli.explain import add_explain
from paceline.cli.flags import CommandList, dashed, show_help
from paceline.cli.keys import add_keys
from paceline.cli.models import add_models
from paceline.cli.replay import add_replay
from paceline.cli.run import add_run
from paceline.cli.run_batch.flags import add_run_batch
from paceline.cli.serve.flags import add_serve
from paceline.cli.sim import add_sim
from paceline.cli.steer import add_steering
from paceline.cli.top.run import add_top
from paceline.cli.trace import add_trace
from paceline.cli.tune import add_tune
from paceline.cli.usage import add_usage
from paceline.errors import PacelineError
from paceline.version import __version__

INTERRUPTED = 130
USAGE = 2


class Commands(CommandList):
    headings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Serve and talk": ("serve", "chat", "run", "run-batch"),
        "Models": ("pull", "ls", "show", "rm"),
        "Measure": ("demo", "bench"),
        "Simulate": ("sim", "tune", "replay"),
        "Operate": ("top", "dial", "policy", "keys", "usage", "explain", "trace", "audit"),
        "Set up": ("doctor", "completion"),
    }


app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="An LLM inference engine built around continuous batching.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _paceline(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    show_help(context)


add_serve(app)
add_chat(app)
add_run(app)
add_run_batch(app)
add_models(app)
add_keys(app)
add_steering(app)
add_top(app)
add_usage(app)
add_demo(app)
add_sim(app)
add_tune(app)
add_explain(app)
add_replay(app)
add_trace(app)
add_audit(app)
add_bench(app)
add_doctor(app)
add_completion(app)


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code. Only bugs raise."""
    try:
        command = typer.main.get_command(app)
        if arguments[:1] == [ASK]:
            for line in complete(command, arguments[1:]):
                print(line)
            return 0
        code = command.main(dashed(arguments), prog_name="paceline", standalone_mode=False)
    except PacelineError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message = getattr(error, "format_message", None)  # what the option parser raises
        if message is None:
            raise
        return _fail(message(), USAGE)
    if code == INTERRUPTED:  # the option parser has turned an interrupt into this
        return _fail("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"paceline: error: {line}", file=sys.stderr)
    return code
