"""`paceline completion`: words for the Tab key in bash, zsh and fish.

Owns the three scripts and the words. A script asks `paceline __complete WORD...` and gets the words that may stand in
place of the last one: a line each, with a description behind a tab, and `:files` where files are wanted as well. The
words come from the declared commands and options; nothing heavy is imported, because this runs at every press of Tab.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from paceline.cli.flags import HELP_ROW, Flag, Panel, PanelCommand, add_command, first_line, spec_of
from paceline.config.options import OWN_CLASS, option
from paceline.errors import InputError, PacelineError

ASK = "__complete"
FILES = ":files"
HELP = """
Print a script that completes commands and options.

\b
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

    shell: str = option("", "shell to complete in", choices=tuple(SCRIPTS))


PANELS = (
    Panel(
        title="Completion",
        config=CompletionOptions,
        flags=(Flag(name="shell", metavar="bash|zsh|fish", is_argument=True, default="from $SHELL"),),
    ),
)


def add_completion(app: typer.Typer) -> None:
    add_command(app, "completion", _run, PANELS, HELP)


def _run(values: Mapping[str, Any]) -> None:
    shell = values["shell"] or Path(os.environ.get("SHELL", "")).name
    if shell not in SCRIPTS:
        raise InputError(
            f"there is no completion for {shell or 'an unknown shell'}; give {', '.join(SCRIPTS)}"
        )
    typer.echo(SCRIPTS[shell].strip())


# -- words -------------------------------------------------------------------------------------------------


def complete(root: Any, words: Sequence[str]) -> list[str]:
    """The lines that answer a script; the last word is the one to complete."""
    *before, current = words or [""]
    place = _Place.after(root, [word for word in before if word != "="])  # bash cuts --flag=value at the sign
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
class _Place:
    """Where on a command line the next word stands."""

    command: Any
    waiting: Any = None  # the option whose value it is
    num_arguments: int = 0  # before it
    is_argument: bool = False  # whatever it looks like

    @classmethod
    def after(cls, root: Any, words: Sequence[str]) -> _Place:
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
            is_open = option is not None and not option.is_flag and "=" not in word
            self.waiting = option if is_open else None
        elif word in self.commands:
            self.command = self.commands[word]
        else:
            self.num_arguments += 1

    @property
    def commands(self) -> Mapping[str, Any]:
        return getattr(self.command, "commands", {})

    def option(self, name: str) -> Any:
        options = (each for each in self.command.params if each.param_type_name == "option")
        return next((each for each in options if _dashed(name) in (*each.opts, *each.secondary_opts)), None)

    @property
    def value_of(self) -> Any:
        """The option or argument whose value is wanted, if any."""
        if self.waiting is not None:
            return self.waiting
        arguments = [each for each in self.command.params if each.param_type_name == "argument"]
        left = arguments[self.num_arguments :] or [each for each in arguments[-1:] if each.nargs == -1]
        return left[0] if left else None

    def words(self, current: str) -> Iterator[tuple[str, str]]:
        if self.waiting is None and current.startswith("-") and not self.is_argument:
            for each in self.command.params:
                if each.param_type_name == "option":
                    text = _help(self.command, each)
                    yield from ((name, text) for name in (*each.opts, *each.secondary_opts))
            yield ("--help", HELP_ROW[1])
        elif self.waiting is None and self.commands:
            if not self.num_arguments:  # else the line begins with a word that is no command
                yield from ((name, first_line(command.help)) for name, command in self.commands.items())
        elif self.value_of is not None:
            yield from _values(self.command, self.value_of)

    def wants_files(self, current: str) -> bool:
        parameter = self.value_of
        if parameter is None or (self.waiting is None and current.startswith("-") and not self.is_argument):
            return False
        spec = _spec(self.command, parameter)
        return spec.metadata["kind"] in (str, tuple) and not spec.metadata["choices"]


def _values(command: Any, parameter: Any) -> Iterator[tuple[str, str]]:
    for word in _spec(command, parameter).metadata["choices"] or ():
        if word != OWN_CLASS:
            yield word, ""
    if parameter.metavar == "MODEL":
        from paceline.models.files.fetch import kept_models

        try:
            yield from ((model.name, "downloaded") for model in kept_models(None))
        except (OSError, PacelineError):
            return


def _spec(command: Any, parameter: Any) -> Any:
    panels = command.panels if isinstance(command, PanelCommand) else ()
    flags = ((panel, flag) for panel in panels for flag in panel.flags if flag.name == parameter.name)
    return next((spec_of(panel, flag) for panel, flag in flags), None)


def _help(command: Any, parameter: Any) -> str:
    spec = _spec(command, parameter)
    return str(spec.metadata["help"] if spec is not None else parameter.help or "")


def _dashed(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word
