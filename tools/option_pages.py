"""Writes docs/reference/options.md: the flags of every command, as the commands themselves declare them, and the table
of policies in docs/reference/policies.md.

`python -m tools.option_pages` writes the pages; a test compares them with what it would write.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from paceline.cli import audit, completion, doctor, explain, keys, models, replay, run, steer, trace, usage
from paceline.cli.bench import flags as bench_flags
from paceline.cli.chat import run as chat_run
from paceline.cli.demo import run as demo_run
from paceline.cli.flags import Flag, Panel, default_of, spec_of
from paceline.cli.run_batch import flags as run_batch_flags
from paceline.cli.serve import flags as serve_flags
from paceline.cli.sim import flags as sim_flags
from paceline.cli.top import run as top_run
from paceline.cli.tune import flags as tune_flags
from paceline.config.options import flag_of
from paceline.scheduler.policy import POLICY_CLASSES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "options.md"
POLICY_PAGE = PAGE.with_name("policies.md")
POLICY_HEAD = "| name | order | options |\n|---|---|---|\n"
COMMANDS: dict[str, tuple[Panel, ...]] = {
    "serve": serve_flags.PANELS,
    "chat": chat_run.PANELS,
    "run": run.PANELS,
    "run-batch": run_batch_flags.PANELS,
    "pull": models.PULL_PANELS,
    "ls": models.LIST_PANELS,
    "show": models.SHOW_PANELS,
    "rm": models.REMOVE_PANELS,
    "demo": demo_run.PANELS,
    "sim": sim_flags.PANELS,
    "tune": tune_flags.PANELS,
    "explain": explain.PANELS,
    "replay": replay.PANELS,
    "trace": trace.PANELS,
    "audit verify": audit.VERIFY_PANELS,
    "audit bias": audit.BIAS_PANELS,
    "bench serve": bench_flags.SERVE_PANELS,
    "bench sweep": bench_flags.SWEEP_PANELS,
    "bench compare": bench_flags.COMPARE_PANELS,
    "bench throughput": bench_flags.THROUGHPUT_PANELS,
    "bench latency": bench_flags.LATENCY_PANELS,
    "dial": steer.DIAL_PANELS,
    "policy": steer.POLICY_PANELS,
    "top": top_run.PANELS,
    "keys add": keys.ADD_PANELS,
    "keys ls": keys.LIST_PANELS,
    "keys revoke": keys.REVOKE_PANELS,
    "usage": usage.PANELS,
    "doctor": doctor.PANELS,
    "completion": completion.PANELS,
}
HEAD = (
    "# Options\n\n"
    "Made from the declarations in `config.py`, `config_serve.py`, `config_process.py` and the commands; "
    "`make options` makes it again. Numbers may be written with k, m or g (thousands), or K, M or G (powers of "
    "1,024); underscores in a flag's name are as good as dashes. For `serve`, every flag is also a key of the "
    "`--config` file (`port: 9000`) and an environment variable (`PACELINE_PORT=9000`); the command line counts "
    "first, then the environment, then the file.\n"
)


def page() -> str:
    parts = [HEAD]
    for command, panels in COMMANDS.items():
        parts.append(f"\n## paceline {command}\n")
        for title, rows in _by_title(panels):
            parts.append(f"\n### {title}\n\n| flag | values | default | meaning |\n|---|---|---|---|\n")
            parts += [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join(parts)


def _by_title(panels: tuple[Panel, ...]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    titles = dict.fromkeys(panel.title for panel in panels)
    for title in titles:
        rows = [_row(panel, flag) for panel in panels if panel.title == title for flag in panel.flags]
        yield title, rows


def _row(panel: Panel, flag: Flag) -> tuple[str, ...]:
    spec = spec_of(panel, flag)
    names = [flag.metavar or flag.name.upper()] if flag.is_argument else [*flag.also, flag_of(spec)]
    shown = ", ".join(f"`{name}`" for name in names)
    return shown, _values(spec), default_of(spec, flag), spec.metadata["help"].replace("|", "\\|")


def _values(spec: Field[Any]) -> str:
    low, high, choices = (spec.metadata[key] for key in ("low", "high", "choices"))
    if choices:
        return ", ".join(choices)
    kind = {int: "whole number", float: "number", bool: "yes or no", str: "text", tuple: "text, several"}
    text = kind.get(spec.metadata["kind"], "text")
    if low is not None and high is not None:
        return f"{text}, {low:,} to {high:,}"
    if low is not None:
        return f"{text}, at least {low:,}"
    return text if high is None else f"{text}, at most {high:,}"


def policy_page() -> str:
    """The page of policies, with its table as their classes declare it."""
    before, _, after = POLICY_PAGE.read_text(encoding="utf-8").partition(POLICY_HEAD)
    return before + POLICY_HEAD + "".join(_policy_rows()) + "\n" + after.partition("\n\n")[2]


def _policy_rows() -> Iterator[str]:
    for name, kind in POLICY_CLASSES.items():
        options = ", ".join(f"`--{option.replace('_', '-')}`" for option in kind.options)
        yield f"| `{name}` | {inspect.getdoc(kind)} | {options} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    POLICY_PAGE.write_text(policy_page(), encoding="utf-8")
