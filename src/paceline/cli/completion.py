"""`paceline completion`: words for the Tab key in bash, zsh and fish.

Owns the three scripts and the words. A script calls `paceline __complete WORD...` and gets the words that may stand in
place of the last one: a line each, with a description behind a tab, and `:files` where files are wanted as well. The
words come from the declared commands and options; nothing heavy is imported, because this runs at every press of Tab.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.command import (
    HELP_ALL,
    HELP_ALL_TEXT,
    HELP_TEXT,
    Command,
    CommandGroup,
    CommandOption,
    first_line,
)
from paceline.config.options import OWN_CLASS, option
from paceline.errors import InputError, PacelineError

ASK = "__complete"
FILES = ":files"
HELP = """
Print a script that completes commands and options.

  eval "$(paceline completion bash)"        # in ~/.bashrc
  eval "$(paceline completion zsh)"         # in ~/.zshrc, after compinit
  paceline completion fish | source         # in ~/.config/fish/config.fish

The script completes commands, flags, values of flags, names of downloaded models, and files.
"""
SCRIPTS = {
    "bash": r"""
_paceline() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            :files) compopt -o default ;;
            *) COMPREPLY+=("${line%%$'\t'*}") ;;
        esac
    done < <("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _paceline paceline
""",
    "zsh": r"""
#compdef paceline
_paceline() {
    local line
    local -i wants_files=0
    local -a found
    for line in "${(@f)$("${(Q)words[1]}" __complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)}"; do
        case $line in
            '') ;;
            :files) wants_files=1 ;;
            *$'\t'*) found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}") ;;
            *) found+=("${line//:/\\:}") ;;
        esac
    done
    (( $#found )) && _describe paceline found
    (( wants_files )) && _files
}
if [[ $funcstack[1] == _paceline ]]; then _paceline "$@"; else compdef _paceline paceline; fi
""",
    "fish": r"""
function __paceline_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    for line in ($before[1] __complete $before[2..-1] "$current" 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path "$current"
        else
            echo $line
        end
    end
end
complete -c paceline -f -a '(__paceline_complete)'
""",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """What `paceline completion` takes."""

    shell: str = option(
        "",
        "shell to complete in",
        choices=tuple(SCRIPTS),
        argument=True,
        metavar="bash|zsh|fish",
        default_text="from $SHELL",
    )


def _run(values: Mapping[str, Any]) -> None:
    shell = values["shell"] or Path(os.environ.get("SHELL", "")).name
    if shell not in SCRIPTS:
        raise InputError(
            f"there is no completion for {shell or 'an unknown shell'}; give {', '.join(SCRIPTS)}"
        )
    print(SCRIPTS[shell].strip())


COMPLETION = Command(name="completion", help=HELP, run=_run, takes=(CompletionOptions,))


# -- words -------------------------------------------------------------------------------------------------


def complete(root: CommandGroup, words: Sequence[str]) -> list[str]:
    """The lines that answer a script; the last word is the one to complete."""
    *before, current = words or [""]
    # bash cuts --flag=value at the sign.
    place = _Cursor.after(root, [word for word in before if word != "="])
    prefix = ""
    if current == "=":
        current = ""
    elif place.waiting is None and current.startswith("--") and "=" in current:
        name, _, current = current.partition("=")
        place.waiting, prefix = place.option(name), f"{name}="
    found = [(word, text) for word, text in place.words(current) if word.startswith(_dashed(current))]
    lines = [f"{prefix}{word}\t{text}" if text else prefix + word for word, text in found]
    return [*lines, FILES] if place.wants_files(current) else lines


@dataclass(slots=True)
class _Cursor:
    """Where on a command line the next word stands."""

    command: Command | CommandGroup
    waiting: CommandOption | None = None  # the option whose value it is
    num_arguments: int = 0  # before it
    is_argument: bool = False  # even if it begins with a dash

    @classmethod
    def after(cls, root: CommandGroup, words: Sequence[str]) -> _Cursor:
        place = cls(root)
        for word in words:
            place._take(word)
        return place

    def _take(self, word: str) -> None:
        if self.waiting is not None:
            self.waiting = None
        elif word == "--":
            self.is_argument = True
        elif word.startswith("-") and not self.is_argument:
            option = self.option(word.partition("=")[0])
            is_open = option is not None and not option.is_switch and "=" not in word
            self.waiting = option if is_open else None
        elif isinstance(self.command, CommandGroup) and word in self.command.commands:
            self.command = self.command.commands[word]
        else:
            self.num_arguments += 1

    def option(self, name: str) -> CommandOption | None:
        return self.command.flags.get(_dashed(name)) if isinstance(self.command, Command) else None

    @property
    def value_of(self) -> CommandOption | None:
        """The option or argument whose value is wanted, if any."""
        if self.waiting is not None or isinstance(self.command, CommandGroup):
            return self.waiting
        arguments = self.command.arguments
        left = arguments[self.num_arguments :] or [each for each in arguments[-1:] if each.is_repeated]
        return left[0] if left else None

    def words(self, current: str) -> Iterator[tuple[str, str]]:
        if self.waiting is None and current.startswith("-") and not self.is_argument:
            yield from _flags(self.command)
        elif isinstance(self.command, CommandGroup):
            if not self.num_arguments:  # else the line begins with a word that is no command
                yield from ((name, first_line(each.help)) for name, each in self.command.commands.items())
        elif self.value_of is not None:
            yield from _values(self.value_of)

    def wants_files(self, current: str) -> bool:
        option = self.value_of
        if option is None or (self.waiting is None and current.startswith("-") and not self.is_argument):
            return False
        return option.kind in (str, tuple) and not option.choices


def _flags(command: Command | CommandGroup) -> Iterator[tuple[str, str]]:
    if isinstance(command, CommandGroup):
        yield from command.flags
        return
    yield from ((name, each.help) for name, each in command.flags.items())
    if command.is_long:
        yield (HELP_ALL, HELP_ALL_TEXT)
    yield ("--help", HELP_TEXT)


def _values(option: CommandOption) -> Iterator[tuple[str, str]]:
    yield from ((word, "") for word in option.choices if word != OWN_CLASS)
    if option.metavar == "MODEL":
        from paceline.models.files.fetch import kept_models

        try:
            yield from ((model.name, "downloaded") for model in kept_models(None))
        except (OSError, PacelineError):
            return


def _dashed(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word
