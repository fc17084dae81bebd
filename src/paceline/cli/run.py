"""`paceline run`: one prompt, one streamed answer.

Owns where the prompt comes from and what is printed where: the answer alone goes to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.cli.command import Command
from paceline.cli.flags import ANSWERING, RANDOM_SEED, engine_options, find_model, given_sampling
from paceline.cli.pictures import content_with
from paceline.config.options import option
from paceline.errors import InputError

HELP = """
Answer one prompt and print the answer as it is generated.

  paceline run "Name three rivers."
  paceline run --raw --max-tokens 40 "Once upon a time"
  paceline run --image cat.jpg "What is it?"
  cat notes.txt | paceline run --model org/model -

The prompt is a chat message if the model has a chat template; without one, or with --raw, the text is continued.
Without a prompt, or with -, it is read from standard input.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `paceline run` takes beside the model's options."""

    PANEL: ClassVar = "Prompt"

    prompt: str | None = option(None, "the prompt; -: read standard input", argument=True, metavar="PROMPT")
    system_prompt: str | None = option(None, "instructions for the model", basic=True)
    image: str | None = option(
        None, "show the model a picture; commas for several", basic=True, metavar="FILE"
    )
    raw: bool = option(False, "continue the prompt as text instead of answering it", basic=True)
    stats: bool = option(False, "print time to first token and tokens/s, to standard error", basic=True)


def _run(values: Mapping[str, Any]) -> None:
    engine, given = engine_options(values), given_sampling(values)
    if values["raw"] and values["system_prompt"] is not None:
        raise InputError("--system-prompt is part of a conversation and --raw has none; give one of them")
    if values["raw"] and values["image"]:
        raise InputError("--image is part of a conversation and --raw has none; give one of them")
    prompt = read_prompt(values["prompt"])
    content = content_with(prompt, values["image"])
    find_model(engine)

    from paceline.cli.answering import Talker
    from paceline.cli.terminal import Printer, note

    printer = Printer(sys.stdout)
    with Talker(engine) as talker:
        if values["raw"] or not (talker.has_template or values["image"]):
            answer = talker.complete(prompt, given, printer.show)
        else:
            messages = conversation(values["system_prompt"], content)
            answer = talker.reply(messages, given, printer.show)
        printer.end_line()
        if values["stats"]:
            note(answer.describe())
    answer.check()


def read_prompt(given: str | None) -> str:
    """The prompt as given, or from standard input, less the newline that ends a file."""
    if given is not None and given != "-":
        prompt = given
    elif given is None and sys.stdin.isatty():
        raise InputError('give a prompt, as in: paceline run "Name three rivers.", or use paceline chat')
    else:
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InputError("the prompt on standard input is not UTF-8 text") from error
    if not prompt:
        raise InputError("the prompt is empty")
    return prompt


def conversation(system_prompt: str | None, prompt: Any) -> list[dict[str, Any]]:
    system: list[dict[str, Any]] = (
        [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    )
    return [*system, {"role": "user", "content": prompt}]


RUN = Command(name="run", help=HELP, run=_run, takes=(RunOptions, *ANSWERING), defaults=RANDOM_SEED)
