"""`paceline chat`: a conversation on the terminal, or line by line from a pipe.

Owns the loop and what is printed around answers; turns and the reading of lines are in `conversation`.
The banner is shown before anything heavy is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.cli.command import Command
from paceline.cli.flags import ANSWERING, RANDOM_SEED, engine_options, find_model, given_sampling
from paceline.config.options import option
from paceline.errors import EngineFailed, InputError, PacelineError

if TYPE_CHECKING:
    from paceline.cli.answering import Talker
    from paceline.cli.chat.conversation import ChatSession, LineSource
    from paceline.cli.remote import Remote

HELP = """
Talk to a model on the terminal.

  paceline chat
  paceline chat -q "Name three rivers."
  paceline chat --model org/model --system-prompt "Answer in one sentence."
  paceline chat --image cat.jpg
  paceline chat --url http://localhost:8000

Ctrl-C stops an answer, Ctrl-D or /bye exits, /? lists the commands. Pasted text is one message; the up arrow brings
back earlier ones. When standard input is not a terminal, each line is a message.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What `paceline chat` takes beside the model's options."""

    PANEL: ClassVar = "Conversation"

    quick: str | None = option(
        None, "ask this, print the answer and exit", basic=True, also=("-q",), metavar="MESSAGE"
    )
    system_prompt: str | None = option(None, "instructions for the model", basic=True)
    image: str | None = option(
        None,
        "show the model a picture with the first message; commas for several",
        basic=True,
        metavar="FILE",
    )
    stats: bool = option(False, "print time to first token and tokens/s, to standard error", basic=True)
    url: str | None = option(
        None,
        "talk to this server instead of loading a model; its key is in PACELINE_API_KEY",
        basic=True,
    )


def _chat(values: Mapping[str, Any]) -> None:
    quick = values["quick"]
    if quick is not None and not quick.strip():
        raise InputError("the message of --quick is empty")
    given = given_sampling(values)
    on_terminal = quick is None and sys.stdin.isatty() and sys.stdout.isatty()
    if values["url"] is not None:
        _chat_with_server(values, given, on_terminal=on_terminal)
        return
    engine = engine_options(values)
    find_model(engine)
    if on_terminal:
        _banner(values["model"] or "SmolLM2-135M-Instruct")

    from paceline.cli.answering import Talker

    with Talker(engine) as talker:
        if not talker.has_template:
            raise InputError(
                'this model has no chat template; use paceline run --raw "TEXT" to continue a text'
            )
        _converse(talker, given, values, on_terminal=on_terminal)


def _chat_with_server(values: Mapping[str, Any], given: Mapping[str, Any], *, on_terminal: bool) -> None:
    from paceline.cli.remote import Remote

    unused = [name for name in engine_options(values) if name not in ("model", "seed")]
    if unused:
        flag = "--" + unused[0].replace("_", "-")
        raise InputError(
            f"{flag} is for a model in this process, and --url talks to a server; give one of them"
        )
    remote = Remote(values["url"], values["model"])
    if on_terminal:
        _banner(f"{remote.model} at {values['url']}")
    if values["seed"] is not None:
        given = {**given, "seed": values["seed"]}
    _converse(remote, given, values, on_terminal=on_terminal)


def _converse(
    talker: Talker | Remote, given: Mapping[str, Any], values: Mapping[str, Any], *, on_terminal: bool
) -> None:
    from paceline.cli.chat.conversation import ChatSession, open_lines

    session = ChatSession(
        talker,
        given,
        system_prompt=values["system_prompt"],
        shows_stats=values["stats"],
        images=values["image"],
    )
    if values["quick"] is not None:
        session.say(values["quick"]).check()
        return
    with open_lines(on_terminal) as lines:
        _talk(session, lines, on_terminal=on_terminal)


def _banner(model: str) -> None:
    from paceline.version import __version__

    print(f"paceline {__version__}, {model}. /? for help, Ctrl-D to leave.", flush=True)


def _talk(session: ChatSession, lines: LineSource, *, on_terminal: bool) -> None:
    """Messages and commands until there are no more. Only an engine that is lost ends it early."""
    from paceline.cli.chat.conversation import LEAVE
    from paceline.cli.terminal import keys_unseen, note

    while True:
        try:
            message = lines.read()
            if message is None or message.strip() in LEAVE:
                return
            with keys_unseen():
                answer = session.take(message) if message.strip() else None
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print("\n(Ctrl-D or /bye leaves.)")
        except EngineFailed:
            raise
        except PacelineError as error:
            note(f"({error})")
        else:
            if answer is not None and answer.is_interrupted and not on_terminal:
                answer.check()


CHAT = Command(name="chat", help=HELP, run=_chat, takes=(ChatOptions, *ANSWERING), defaults=RANDOM_SEED)
