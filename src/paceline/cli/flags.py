"""Command-line flags and help pages from declared options.

An option is declared once, as a field made with `config.option` (default, help, bounds, choices, whether it is basic).
This module turns such fields into the parameters of a command and into its help page, so that no flag, help text or
bound is written twice.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.config.engine import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from paceline.config.options import flag_of, option
from paceline.core.sampling import Offer, SamplingParams, offered
from paceline.errors import InputError, InvalidRequest
from paceline.llm.arguments import split_arguments
from paceline.models.files.sampling_defaults import ANSWER_TOKENS, FALLBACK

MANY = 20  # options; a command with more shows only the basic ones on its help page
HELP_ALL = "help_all"
HELP_ROW = ("-h, --help", "show this page")
JOINER = "\ue000"  # stands for a hyphen while a page is laid out, so that no flag is broken over two lines
FLAG_COLUMN, LONGEST_CHOICES = 29, 20  # characters of a help page
# By how an option's name ends: units come last, and so does what a path is for.
_METAVARS = {
    "_bytes": "BYTES",
    "_ms": "MS",
    "_s": "SECONDS",
    "file": "FILE",
    "ledger": "FILE",
    "_dir": "FOLDER",
}
_NUMBER = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)([kmgKMG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How one declared option appears on a command line."""

    name: str  # of the field
    also: tuple[str, ...] = ()  # shorter names, given first
    default: str | None = None  # what holds when it is not given, in words, if not the field's own default
    metavar: str | None = None
    is_argument: bool = False  # given by its place, not by a name


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A group of flags in the help page, all fields of one config."""

    title: str
    config: type
    flags: tuple[Flag, ...]
    optional: bool = False  # None unless given, so that the command can tell


def add_command(
    app: typer.Typer, name: str, run: Callable[[Mapping[str, Any]], None], panels: Iterable[Panel], help: str
) -> None:
    """Add a command whose parameters are the panels' flags; `run` gets their values by field name."""
    shown = tuple(panels)

    def command(**values: Any) -> None:
        run(values)

    class Command(PanelCommand):
        panels = shown

    parameters = [_parameter(panel, flag) for panel in shown for flag in panel.flags]
    if _is_long(shown):
        parameters.append(_HELP_ALL_PARAMETER)
    signature = inspect.Signature(parameters)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=help, cls=Command)(command)


class PanelCommand(TyperCommand):
    """A command whose help page is made from its panels.

    A command with many options has two pages: `--help` lists the basic ones, `--help-all` all of them in groups.
    """

    panels: ClassVar[tuple[Panel, ...]] = ()

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(JOINER, "-")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(inspect.cleandoc(self.help or "").replace("-", JOINER))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, rows in self._sections(is_short=self._is_short(ctx)).items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=FLAG_COLUMN)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self._is_short(ctx):
            count = sum(1 for panel in self.panels for flag in panel.flags if not flag.is_argument)
            formatter.write_paragraph()
            formatter.write_text(f"Defaults are in brackets. --help-all shows all {count} options.")

    def _is_short(self, ctx: Any) -> bool:
        return _is_long(self.panels) and not ctx.meta.get(HELP_ALL)

    def _sections(self, *, is_short: bool) -> dict[str, list[tuple[str, str]]]:
        sections: dict[str, list[tuple[str, str]]] = {}
        for panel in self.panels:
            for flag in panel.flags:
                spec = spec_of(panel, flag)
                if not is_short or flag.is_argument or spec.metadata["basic"]:
                    title = "Options" if is_short else panel.title
                    sections.setdefault(title, []).append(_row(panel, flag, is_short=is_short))
        rows = sections.setdefault("Options" if is_short else "Help", [])
        rows.append(HELP_ROW)
        if _is_long(self.panels):
            rows.append(("--help-all", "show all options, by topic"))
        return sections


class CommandList(TyperGroup):
    """A group of commands: its help page shows the first line of each command's help, under headings."""

    headings: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # of all commands; empty: one list

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        records = [parameter.get_help_record(ctx) for parameter in self.params]
        with formatter.section("Options"):
            formatter.write_dl([*(record for record in records if record is not None), HELP_ROW])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for name in self.commands)
        for title, names in (self.headings or {"Commands": tuple(self.list_commands(ctx))}).items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{name:<{width}}", first_line(self.commands[name].help)) for name in names]
                )


def command_group(name: str, help: str) -> typer.Typer:
    """A command that has commands of its own; called without one, it shows its help page."""
    return typer.Typer(
        name=name,
        help=help,
        cls=CommandList,
        callback=show_help,
        invoke_without_command=True,
        rich_markup_mode=None,
    )


def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def first_line(help: str | None) -> str:
    return (help or "").strip().partition("\n")[0]


def whole_number(text: str | int) -> int:
    """A whole number as people write them: 4096, 4k (4,000), 4K (4,096), 1.5m."""
    found = _NUMBER.fullmatch(str(text).strip().replace("_", ""))
    if found is None:
        raise ValueError
    value = float(found[1]) * _UNITS[found[2]] if "." in found[1] else int(found[1]) * _UNITS[found[2]]
    if value != int(value):
        raise ValueError
    return int(value)


def _number_flag(text: str | int) -> int:
    try:
        return whole_number(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number (such as 4096, 4k or 4K).") from None


def dashed(arguments: Sequence[str]) -> list[str]:
    """Arguments with the names of flags spelled in one way: --max_num_seqs is --max-num-seqs."""
    done: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return done + list(arguments[index:])
        name, equals, value = argument.partition("=")
        done.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return done


def spec_of(panel: Panel, flag: Flag) -> Field[Any]:
    """The declared option of a flag."""
    return next(spec for spec in fields(panel.config) if spec.name == flag.name)


def default_of(spec: Field[Any], flag: Flag) -> str:
    """What holds when an option is not given, as text that could be given; empty where there is nothing to say."""
    default = spec.default
    if flag.default is not None:
        return flag.default
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, int) and spec.name.endswith("_bytes"):
        for unit in "GMK":
            if default % _UNITS[unit] == 0:
                return f"{default // _UNITS[unit]}{unit}"
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None else str(default)


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL_PARAMETER = inspect.Parameter(
    HELP_ALL,
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        bool, typer.Option("--help-all", is_eager=True, expose_value=False, callback=_show_all)
    ],
    default=False,
)


def _is_long(panels: Sequence[Panel]) -> bool:
    return sum(len(panel.flags) for panel in panels) > MANY


@cache
def _kinds(config: type) -> dict[str, Any]:
    return get_type_hints(config)


def _kind(panel: Panel, flag: Flag) -> Any:
    kind = _kinds(panel.config)[flag.name]
    # A flag that may be given several times.
    return list[str] | None if tuple[str, ...] in (kind, *get_args(kind)) else kind


def _parameter(panel: Panel, flag: Flag) -> inspect.Parameter:
    spec, kind = spec_of(panel, flag), _kind(panel, flag)
    assert spec.default is not MISSING, flag.name
    metavar = _metavar(spec, flag, kind)
    declared: Any
    if flag.is_argument:
        declared = typer.Argument(metavar=metavar)
    else:
        parser = _number_flag if int in (kind, *get_args(kind)) else None
        declared = typer.Option(*_names(spec, flag, kind), metavar=metavar, parser=parser)
    return inspect.Parameter(
        flag.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind | None if panel.optional else kind, declared],
        default=None if panel.optional else spec.default,
    )


def _names(spec: Field[Any], flag: Flag, kind: object) -> tuple[str, ...]:
    own = flag_of(spec)
    if has_no(spec, kind):
        own = f"{own}/--no-{own.removeprefix('--')}"
    return (*flag.also, own)


def has_no(spec: Field[Any], kind: object) -> bool:
    """Whether a flag can be given as --no-..., because it is not off by default."""
    return bool in (kind, *get_args(kind)) and spec.default is not False


def _row(panel: Panel, flag: Flag, *, is_short: bool) -> tuple[str, str]:
    """A flag on a help page. Other long spellings of it are left to the page with all options."""
    spec, kind = spec_of(panel, flag), _kind(panel, flag)
    metavar = _metavar(spec, flag, kind)
    if flag.is_argument:
        return metavar or flag.name.upper(), _help(spec, flag)
    own = flag_of(spec)
    if has_no(spec, kind):
        own = f"--[no-]{own.removeprefix('--')}"
    short = [name for name in flag.also if not name.startswith("--")]
    other = [name for name in flag.also if name.startswith("--") and not is_short]
    names = ", ".join((*short, own, *other))
    return f"{names} {metavar}" if metavar else names, _help(spec, flag)


def _help(spec: Field[Any], flag: Flag) -> str:
    text: str = spec.metadata["help"]
    choices = spec.metadata["choices"]
    if choices and len("|".join(choices)) > LONGEST_CHOICES:
        text = f"{text}: {', '.join(choices)}"
    default = default_of(spec, flag)
    is_said = default and (flag.default is not None or spec.default is not False)
    return (f"{text} [{default}]" if is_said else text).replace("-", JOINER)


def _metavar(spec: Field[Any], flag: Flag, kind: object) -> str | None:
    choices = spec.metadata["choices"]
    if flag.metavar:
        return flag.metavar
    if choices:
        joined = "|".join(choices)
        return joined if len(joined) <= LONGEST_CHOICES else "NAME"
    plain = next((part for part in get_args(kind) if part is not type(None)), kind)
    if plain not in (int, float, str):
        return None
    other = "TEXT" if plain is str else "N"
    return next((text for end, text in _METAVARS.items() if spec.name.endswith(end)), other)


# Flags that commands show alike, whether they load a model or simulate one.


# How batches are formed, and how much of a step one prompt may take.
FORMING = (
    Flag(name="batch_size"),
    Flag(name="batch_timeout_s", also=("--batch-timeout",)),
    Flag(name="static_flush_s"),
    Flag(name="static_order"),
    Flag(name="long_prefill_share"),
)
# Between latency and throughput; one of them at most.
DIAL = (
    Flag(name="dial", default="off"),
    Flag(name="target_itl_p99_ms", default="none"),
    Flag(name="target_ttft_p99_ms", default="none"),
)
# Who goes first.
POLICY = (
    Flag(name="scheduling_policy"),
    Flag(name="ageing_s"),
    Flag(name="prompt_handicap_ms"),
    Flag(name="output_handicap_ms"),
    Flag(name="first_token_s", default="any time before the deadline"),
    Flag(name="tenant_weights"),
    Flag(name="output_token_cost"),
    Flag(name="flood_tokens"),
)
BUDGET = (
    Flag(name="max_num_batched_tokens", default="measured at start"),
    Flag(name="max_num_prompt_tokens", default="measured on a CPU"),
)
KV_BLOCKS = Panel(
    title="Engine",
    config=KVConfig,
    optional=True,
    flags=(
        Flag(name="block_size"),
        Flag(name="num_blocks", default="what fits into --kv-cache-memory-bytes"),
        Flag(name="enable_prefix_caching"),
    ),
)


def depth_panel(title: str) -> Panel:
    """`--depth`, in whichever group of the help page."""
    return Panel(title=title, config=EngineConfig, optional=True, flags=(Flag(name="depth"),))


# The flags that commands which load a model share, and what they become


# How tokens are chosen: the parameters of `SamplingParams` that commands offer. None: as the model's makers recommend.
SamplingOptions = make_dataclass(
    "SamplingOptions",
    [
        (spec.name, spec.type | None, option(None, spec.help, kind=spec.kind, basic=spec.is_basic))
        for spec in offered(Offer.FLAG)
    ],
    frozen=True,
)
_RECOMMENDED = {**FALLBACK.sampling, "max_tokens": ANSWER_TOKENS, "top_k": 0}
SAMPLING = Panel(
    title="Sampling",
    config=SamplingOptions,
    optional=True,
    flags=tuple(
        Flag(
            name=spec.name,
            default=f"the model's own, else {_RECOMMENDED[spec.name]}" if spec.name in _RECOMMENDED else None,
            metavar="TEXT" if spec.is_text else None,
        )
        for spec in offered(Offer.FLAG)
    ),
)
MODEL = Panel(
    title="Model",
    config=ModelConfig,
    optional=True,
    flags=(
        Flag(name="model", also=("-m",), metavar="MODEL", default="SmolLM2-135M-Instruct"),
        Flag(name="tokenizer", metavar="FOLDER"),
        Flag(name="revision", metavar="NAME"),
        Flag(name="download_dir", metavar="FOLDER"),
        Flag(name="load_format"),
        Flag(name="device"),
        Flag(name="dtype"),
        Flag(name="quantization"),
        Flag(name="kv_cache_dtype"),
        Flag(name="kv_cache_memory_bytes", default="2G, at most a quarter of free memory; on a GPU the rest"),
        Flag(name="gpu_memory_utilization"),
        Flag(name="enforce_eager"),
    ),
)
ENGINE = (
    Panel(
        title="Engine",
        config=SchedulerConfig,
        optional=True,
        flags=(Flag(name="max_model_len", default="what model and KV cache allow"),),
    ),
    KV_BLOCKS,
)
BATCH = Panel(
    title="Engine",
    config=SchedulerConfig,
    optional=True,
    flags=(
        Flag(name="max_num_seqs", default="128"),
        *BUDGET,
    ),
)


def seed_panel(default: str) -> Panel:
    """`--seed`, whose meaning when absent differs between talking and computing."""
    return Panel(
        title="Sampling", config=ModelConfig, optional=True, flags=(Flag(name="seed", default=default),)
    )


# What every command takes that talks to a model.
TALKING = (SAMPLING, seed_panel("random"), MODEL, *ENGINE)


def engine_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave of the options `LLM` and `AsyncLLM` take, checked as far as that needs no model."""
    known = {
        spec.name
        for config in (ModelConfig, KVConfig, SchedulerConfig, EngineConfig)
        for spec in fields(config)
    }
    given = {name: value for name, value in values.items() if name in known and value is not None}
    split_arguments(None, given)
    return given


def find_model(engine: Mapping[str, Any]) -> None:
    """Fetch the model where it is not here; a name that is none is said before torch is imported."""
    from paceline.models.files.fetch import bring_here

    bring_here(engine.get("model"), engine.get("revision"), engine.get("download_dir"))


def given_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave of sampling, checked."""
    names = [spec.name for spec in fields(SamplingOptions)]
    given = {name: values[name] for name in names if values.get(name) is not None}
    checked_sampling(given)
    return given


def checked_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling from what was given; a mistake is told under the name of its flag."""
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        name = error.param or ""
        text = str(error)
        if name and text.startswith(name):
            text = "--" + name.replace("_", "-") + text.removeprefix(name)
        raise InputError(text) from error


# Lists on a command line


def split_list(text: str, flag: str) -> list[str]:
    """The parts of a list with commas, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{flag} '{text}' has an empty entry; separate entries by single commas")
    return list(dict.fromkeys(parts))


# Files that commands are asked to write, checked before anything runs


def writable(flag: str, name: str | None) -> Path | None:
    """The path a flag names, if a file can be written there; None where the flag was not given."""
    if not name:
        return None
    path, folder = Path(name), Path(name).parent
    if name == "-":
        raise InputError(f"{flag} -: standard output has the table; give the name of a file")
    if path.is_dir():
        raise InputError(f"{flag} {name}: that is a folder; give the name of a file")
    if not folder.is_dir():
        raise InputError(f"{flag} {name}: the folder {folder} does not exist; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{flag} {name}: there is no permission to write it")
    return path
