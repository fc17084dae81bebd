"""`paceline contexts`: keep texts on a server, see them, delete them; and what blending keeps of a model's answers.

Owns the flags and what is printed. The key comes from the environment, PACELINE_API_KEY, never from the command line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paceline.cli.command import Command, CommandGroup
from paceline.cli.flags import engine_options, find_model
from paceline.cli.steer import ServerOptions
from paceline.cli.terminal import columns
from paceline.config.engine import REUSE
from paceline.config.options import option
from paceline.core.parameters import MAX_PIN_S
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.cli.remote import Connection

HELP = """
Texts that a server keeps computed, for conversations to name.

  paceline contexts add manual.txt --name manual --ttl-s 86400
  paceline contexts ls
  paceline contexts rm ctx_5f0c...
  paceline contexts check smollm2 --prompts asked.jsonl

The key is read from PACELINE_API_KEY; a key sees its own contexts only.
"""
PATH = "/v1/contexts"
HEADS = ("id", "name", "model", "tokens", "blocks", "expires")
STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddOptions:
    """What is to be kept."""

    file: str = option("", "file with the text; -: what is piped in", argument=True, metavar="FILE")
    name: str = option("", "name, for people", metavar="NAME")
    ttl_s: int = option(3600, "seconds that it is kept", low=1, high=MAX_PIN_S)
    pin: bool = option(True, "compute it now and keep its KV in the cache")
    context_reuse: str = option(
        "exact",
        "how it is computed; exact: as the beginning of a conversation; blend: alone, to be placed in prompts",
        choices=REUSE,
    )
    role: str = option(
        "user", "role of the message that begins with it, as it is computed", choices=("user", "system")
    )
    model: str = option("", "model that computes it", metavar="NAME", default_text="the server's first")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdOptions:
    """Which one."""

    id: str = option("", "id of the context", argument=True, metavar="ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Which model, and on which prompts."""

    which: str = option("", "folder, GGUF file or name of a model", argument=True, metavar="MODEL")
    prompts: str | None = option(
        None,
        "lines of JSON, each with passages (texts) and question",
        metavar="FILE",
        default_text="eight of our own",
    )
    json: bool = option(False, "print the figures as JSON")


def _server(given: Mapping[str, Any]) -> Connection:
    from paceline.cli.remote import Connection

    return Connection(given["url"], os.environ.get("PACELINE_API_KEY", ""))


def _add(given: Mapping[str, Any]) -> None:
    if not given["file"]:
        raise InputError("which text? Give its file, or - for what is piped in")
    try:
        text = sys.stdin.read() if given["file"] == STDIN else Path(given["file"]).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {given['file']}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{given['file']} is not a text in UTF-8") from error
    if not text:
        raise InputError(f"{given['file']} is empty")
    body = {name: given[name] for name in ("name", "ttl_s", "pin", "role", "context_reuse")}
    if given["model"]:
        body["model"] = given["model"]
    made = _server(given).ask("POST", PATH, {**body, "text": text})
    if given["json"]:
        print(json.dumps(made))
        return
    pinned = f"{made['blocks']:,} KV blocks pinned" if made["pinned"] else "not pinned"
    print(f"{made['id']}  {made['tokens']:,} tokens, {pinned}, until {made['expires']}")


def _list(given: Mapping[str, Any]) -> None:
    found = _server(given).ask("GET", PATH)
    if given["json"]:
        print(json.dumps(found))
    elif not found["data"]:
        print("This key has no contexts; paceline contexts add FILE makes one.")
    else:
        rows = [tuple(str(card[name]) for name in HEADS) for card in found["data"]]
        print(*columns([HEADS, *rows], 3), sep="\n")


def _remove(given: Mapping[str, Any]) -> None:
    if not given["id"]:
        raise InputError("which context? Give its id; paceline contexts ls shows them")
    answer = _server(given).ask("DELETE", f"{PATH}/{quote(given['id'], safe='')}")
    print(json.dumps(answer) if given["json"] else f"Deleted {given['id']}.")


def _check(given: Mapping[str, Any]) -> None:
    from paceline.config.engine import ModelConfig
    from paceline.config.options import pick
    from paceline.core.blend_quality import LEAST_KEPT
    from paceline.text.passages import built_in, read_asked

    engine = engine_options(given)
    if given["which"]:
        engine["model"] = given["which"]
    asked = built_in() if given["prompts"] is None else read_asked(Path(given["prompts"]))
    find_model(engine)
    from paceline.factory import load_model
    from paceline.runner.blending import blending_of

    model = ModelConfig(**pick(ModelConfig, engine))
    loaded = load_model(model, {}, on_progress=_show_progress)
    make_step = getattr(loaded.sleeper, "make_step", None)
    of_model = (loaded.checkpoint.spec, model, loaded.config, make_step, loaded.tokenizer)
    found = blending_of(*of_model, asked, partial(_show_progress, "prompts"))
    loaded.engine.close()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if given["json"]:
        print(json.dumps({**asdict(found), "least_kept": LEAST_KEPT, "offered": not found.refusal}))
    elif found.kept is None:
        print(f"Contexts cannot be blended: {found.refusal}.")
    else:
        print(
            f"{found.num_prompts} prompts: blending keeps {found.kept:.1%} of what passages change in the next tokens "
            f"(KL {found.divergence:.4f} nats, {found.left_out:.4f} without passages); the likeliest token is the same "
            f"for {found.agreement:.1%}."
        )
        print("blend is offered." if not found.refusal else f"blend is not offered: below {LEAST_KEPT:.0%}.")


def _show_progress(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{stage} {done} of {total}" if total else f"\r\033[K{stage}", end="", file=sys.stderr)


CONTEXTS = CommandGroup(
    name="contexts",
    help=HELP,
    headings={
        "Commands": (
            Command(
                name="add",
                help="Keep a text on a server and have it computed.",
                run=_add,
                takes=(AddOptions, ServerOptions),
            ),
            Command(name="ls", help="List the contexts of this key.", run=_list, takes=(ServerOptions,)),
            Command(name="rm", help="Delete a context.", run=_remove, takes=(IdOptions, ServerOptions)),
            Command(
                name="check",
                help="Measure what blending keeps of a model's answers; no server is needed.",
                run=_check,
                takes=(CheckOptions, "Model"),
            ),
        )
    },
)
