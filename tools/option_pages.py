"""Writes docs/reference/options.md: the flags of every command, as the commands themselves declare them.

`python -m tools.option_pages` writes the page; a test compares it with what it would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from paceline.cli import (
    audit,
    bench_load_options,
    bench_options,
    chat,
    completion,
    demo,
    doctor,
    explain,
    keys_options,
    models,
    replay,
    run,
    run_batch,
    serve,
    sim_options,
    steer,
    top,
    trace,
    tune_options,
    usage,
)
from paceline.cli.options import Flag, Panel, default_of, spec_of
from paceline.config import flag_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "options.md"
COMMANDS: dict[str, tuple[Panel, ...]] = {
    "serve": serve.PANELS,
    "chat": chat.PANELS,
    "run": run.PANELS,
    "run-batch": run_batch.PANELS,
    "pull": models.PULL_PANELS,
    "ls": models.LIST_PANELS,
    "show": models.SHOW_PANELS,
    "rm": models.REMOVE_PANELS,
    "demo": demo.PANELS,
    "sim": sim_options.PANELS,
    "tune": tune_options.PANELS,
    "explain": explain.PANELS,
    "replay": replay.PANELS,
    "trace": trace.PANELS,
    "audit verify": audit.VERIFY_PANELS,
    "audit bias": audit.BIAS_PANELS,
    "bench serve": bench_load_options.SERVE_PANELS,
    "bench sweep": bench_load_options.SWEEP_PANELS,
    "bench compare": bench_load_options.COMPARE_PANELS,
    "bench throughput": bench_options.THROUGHPUT_PANELS,
    "bench latency": bench_options.LATENCY_PANELS,
    "dial": steer.DIAL_PANELS,
    "policy": steer.POLICY_PANELS,
    "top": top.PANELS,
    "keys add": keys_options.ADD_PANELS,
    "keys ls": keys_options.LIST_PANELS,
    "keys revoke": keys_options.REVOKE_PANELS,
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
