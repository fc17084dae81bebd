"""`paceline engine`: an engine that listens, for servers on other machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.cli.command import Command
from paceline.cli.flags import engine_options, find_model
from paceline.cli.serve.flags import ENGINE_PANELS
from paceline.config.links import LinkConfig, read_address
from paceline.config.options import from_values, option
from paceline.errors import InputError
from paceline.llm.arguments import split_arguments
from paceline.version import __version__

HELP = """
Run an engine that listens, for a server on another machine.

  paceline engine org/model --listen 127.0.0.1:7000
  paceline engine org/model --listen /run/paceline/engine.sock

The server is given its address, as in paceline serve org/model --engines 127.0.0.1:7000. An address that other machines
reach needs certificates (see --help-all). The engine stays up when the server goes, and takes the next one. Ctrl-C
or SIGTERM lets the server go on in other engines; a second one stops at once.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model, and where it listens."""

    PANEL: ClassVar = "Engine"

    named_model: str | None = option(
        None, "the model, same as --model", kind=str, argument=True, metavar="MODEL"
    )
    listen: str | None = option(
        None,
        "where to listen: HOST:PORT, port 0 for any free one, or the path of a socket; an address that other "
        "machines reach needs certificates",
        basic=True,
        metavar="ADDRESS",
    )


def _engine(given: Mapping[str, Any]) -> None:
    values = dict(given)
    named, listen = values.pop("named_model"), values.pop("listen")
    if named is not None:
        if values.get("model") not in (None, named):
            raise InputError("the model is given twice; give it once, by its place or with --model")
        values["model"] = named
    if listen is None:
        raise InputError("say where to listen, with --listen HOST:PORT or the path of a socket")
    address, links = read_address(listen, "--listen"), from_values(LinkConfig, values)
    links.check(address, "--listen")
    options = engine_options(values)
    model, engine = split_arguments(None, options)
    find_model(options)

    from paceline.cli.serve.view import LoadingLine
    from paceline.process.client import EngineInfo
    from paceline.process.remote.listen import serve_engine

    def show(info: EngineInfo, place: str) -> None:
        print(
            f"paceline {__version__}: an engine on {info.device}, {info.dtype}, listens on {place}",
            flush=True,
        )

    loading = LoadingLine(sys.stderr)
    code = serve_engine(model, engine, address, links, on_loading=loading.show, on_ready=show)
    sys.stdout.flush()
    os._exit(code)  # nothing that a library still has to say at the end may keep the process


ENGINE = Command(
    name="engine",
    help=HELP,
    run=_engine,
    takes=(
        *(EngineOptions, LinkConfig),
        *ENGINE_PANELS,
    ),
)
