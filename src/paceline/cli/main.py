"""The `paceline` command and its edge: every error meant for users becomes one line and an exit code.

Owns the list of commands and what happens to errors. Commands live in their own files and import what is heavy only
when they run, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from paceline.cli.bench.flags import BENCH
from paceline.cli.chat.run import CHAT
from paceline.cli.command import CommandGroup, dashed
from paceline.cli.completion import ASK, COMPLETION, complete
from paceline.cli.contexts import CONTEXTS
from paceline.cli.demo.run import DEMO
from paceline.cli.doctor import DOCTOR
from paceline.cli.embed import EMBED
from paceline.cli.engine import ENGINE
from paceline.cli.keys import KEYS
from paceline.cli.models import MODELS, TRAIN_HEAD, WARM
from paceline.cli.run import RUN
from paceline.cli.run_batch.flags import RUN_BATCH
from paceline.cli.run_logs import AUDIT, EXPLAIN, REPLAY, TRACE
from paceline.cli.serve.flags import SERVE
from paceline.cli.sim import SIM
from paceline.cli.steer import DIAL, FLEET, POLICY
from paceline.cli.top.run import TOP
from paceline.cli.tune import TUNE
from paceline.cli.usage import USAGE
from paceline.errors import PacelineError
from paceline.version import __version__

INTERRUPTED = 130
PACELINE = CommandGroup(
    name="paceline",
    help="An LLM inference engine built around continuous batching.",
    version=f"paceline {__version__}",
    headings={
        "Serve and talk": (SERVE, ENGINE, CHAT, RUN, RUN_BATCH, EMBED, CONTEXTS),
        "Models": (*MODELS, TRAIN_HEAD),
        "Measure": (DEMO, BENCH),
        "Simulate": (SIM, TUNE, REPLAY),
        "Operate": (TOP, FLEET, DIAL, POLICY, KEYS, USAGE, EXPLAIN, TRACE, AUDIT),
        "Set up": (DOCTOR, WARM, COMPLETION),
    },
)


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code. Only bugs raise."""
    try:
        if arguments[:1] == [ASK]:
            for line in complete(PACELINE, arguments[1:]):
                print(line)
        else:
            PACELINE.call(dashed(arguments), PACELINE.name)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except PacelineError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone. Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"paceline: error: {line}", file=sys.stderr)
    return code
