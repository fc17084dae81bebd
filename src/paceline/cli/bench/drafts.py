"""The runs of `paceline bench drafts`: two engines in turns for each number of clients, or a log without a model."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.cli.bench.view import FORMAT, Report, note, show, write
from paceline.cli.flags import command_line, engine_options, split_list, writable, write_json
from paceline.config.options import from_values
from paceline.config.speculative import ORACLE, read_speculative_config
from paceline.core.sampling import SamplingParams
from paceline.errors import InputError
from paceline.lab.bench.bench_options import DraftsOptions
from paceline.lab.bench.drafts import (
    DraftsResult,
    OracleSide,
    Side,
    compare_oracle,
    compare_sides,
    read_questions,
    read_script,
    say,
)
from paceline.lab.bench.machine import engine_sizes, source_commit
from paceline.lab.bench.shapes import write_shape
from paceline.lab.bench.tables import drafts_table, rounded, script_table
from paceline.models.files.fetch import DEFAULT_NAME, resolve
from paceline.models.files.open import open_checkpoint
from paceline.text.tokenizer import Tokenizer

MOST_CLIENTS = 1024


def drafts(values: Mapping[str, Any]) -> None:
    options = from_values(DraftsOptions, values)
    engine = engine_options(values)
    method = engine.pop("speculative_config", "auto")
    chosen = read_speculative_config(method)
    if chosen is None:
        raise InputError("--speculative-config off makes no drafts; name a method to compare with none")
    if options.drafter is not None:
        _oracle(options, engine, writable("--json", options.json))
        return
    if (options.data is None) == (options.script is None):
        raise InputError("give --data with questions, or --script with a log of requests")
    target = writable("--json", options.json)
    if options.script is not None:
        _script(options, engine, chosen.width, target)
    else:
        _questions(options, engine, method, target)


def _questions(options: DraftsOptions, engine: Mapping[str, Any], method: str, target: Path | None) -> None:
    assert options.data is not None
    by_category = read_questions(Path(options.data))
    wanted = split_list(options.categories, "--categories") if options.categories else list(by_category)
    for name in wanted:
        if name not in by_category:
            raise InputError(f"--categories: there is no {name!r}; there are {', '.join(by_category)}")
    clients = [_number_of(part) for part in split_list(options.clients, "--clients")]
    sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=1)

    def sides(count: int) -> tuple[Side, Side]:
        return Side(engine, count, "off", sampling), Side(engine, count, method, sampling)

    started_s = time.perf_counter()
    plain, drafted = sides(clients[0])
    report = Report(
        kind="drafts",
        model=engine.get("model") or DEFAULT_NAME,
        startup_s=time.perf_counter() - started_s,
        engine={**engine_sizes(drafted.llm.loaded), "speculative_config": method},
    )
    results: list[DraftsResult] = []
    with write(report, target) as save:
        for count in clients:
            if count != clients[0]:
                plain, drafted = sides(count)
            asked = {name: by_category[name][: max(options.questions, count)] for name in wanted}
            for result in compare_sides(plain, drafted, count, asked, options.rounds):
                results.append(result)
                report.results.append(rounded(asdict(result)))
                note(f"{result.category}, {count} client{'s' * (count > 1)}: {result.ratio:.3f}")
                save()
            plain.llm.shutdown()
            drafted.llm.shutdown()
        show(report.title, drafts_table(results))


def _oracle(options: DraftsOptions, engine: Mapping[str, Any], target: Path | None) -> None:
    if options.shape is None:
        raise InputError("--drafter oracle needs --shape: its tokens are random, and so are the weights")
    counts = [_number_of(part) for part in split_list(options.rows, "--rows")]
    config = {"method": ORACLE, "num_speculative_tokens": options.drafts, "acceptance": options.acceptance}
    results: list[DraftsResult] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        engine = {**write_shape(options.shape, Path(folder)), **engine}
        started_s = time.perf_counter()
        plain, drafted = (
            OracleSide(engine, max(counts), options.tokens, method) for method in ("off", json.dumps(config))
        )
        report = Report(
            kind="drafts",
            model=options.shape,
            startup_s=time.perf_counter() - started_s,
            engine={**engine_sizes(drafted.llm.loaded), "speculative_config": config},
        )
        with write(report, target) as save:
            for rows in counts:
                result = compare_oracle(plain, drafted, rows, options.acceptance, options.rounds)
                results.append(result)
                report.results.append(rounded(asdict(result)))
                note(f"{rows} row{'s' * (rows > 1)}: {result.ratio:.3f}")
                save()
            show(report.title, drafts_table(results))


def _number_of(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_CLIENTS:
        raise InputError(f"--clients {text!r}: give numbers from 1 to {MOST_CLIENTS}, as in 1,4,8")
    return int(text)


def _script(options: DraftsOptions, engine: Mapping[str, Any], width: int, target: Path | None) -> None:
    """Both sources, so that what earlier texts bring can be told."""
    assert options.script is not None
    requests = read_script(Path(options.script), options.requests)
    path = resolve(engine.get("model"), engine.get("revision"), engine.get("download_dir"))
    checkpoint = open_checkpoint(path, load_format=engine.get("load_format", "auto"))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    texts = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in requests]
    results = [say(method, texts, width) for method in ("ngram", "history")]
    name = Path(options.script).name
    show(f"{name}, drafts of {width}, every one verified", script_table(results))
    if target is not None:
        found = {
            "format": FORMAT,
            "kind": "script",
            "command": command_line(),
            "commit": source_commit(),
            "log": name,
            "width": width,
            "results": [rounded(asdict(result)) for result in results],
        }
        write_json(target, found)
        print(f"Wrote {target}")
