"""Generating requests again: differences are found, placed and explained; nothing measured is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.cli.bench.view import Report, plain_lines, write
from paceline.cli.flags import writable
from paceline.core.sampling import SamplingParams
from paceline.errors import InputError
from paceline.lab.bench.tables import Grid
from paceline.lab.bench.throughput import Case, recheck
from paceline.llm.llm import LLM
from paceline.llm.outputs import CompletionOutput, Logprob, RequestOutput

FACTS: dict[str, Any] = {"cpu": {"name": "a processor"}, "memory": {}, "system": "", "versions": {}}


class Engine:
    """Answers every prompt with the same tokens, and says how likely the next one was."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.is_empty = False  # the prefix cache
        self.prompts: list[list[int]] = []

    def reset_prefix_cache(self) -> None:
        self.is_empty = True

    def generate(
        self, prompts: list[list[int]], sampling: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        (prompt,), (own,) = prompts, sampling
        assert not use_tqdm
        assert self.is_empty or own.logprobs
        self.is_empty = False
        self.prompts.append(prompt)
        likely = [{7: Logprob(logprob=-1.0), 8: Logprob(logprob=-1.25)}] if own.logprobs else None
        part = CompletionOutput(index=0, token_ids=self.tokens[: own.max_tokens], logprobs=likely)
        return [RequestOutput(request_id="1", prompt=None, prompt_token_ids=prompt, outputs=[part])]


def case(*tokens: int, temperature: float = 0.0) -> Case:
    sampling = SamplingParams(temperature=temperature, max_tokens=len(tokens), seed=1)
    return Case(workload="nano", request=3, prompt=[1, 2], sampling=sampling, token_ids=list(tokens))


def test_equal_tokens_are_no_difference() -> None:
    engine = Engine(5, 6, 7)
    outcome = recheck(cast(LLM, engine), [case(5, 6, 7), case(5, 6, 7)], is_eager=False)
    assert (outcome.num_requests, outcome.num_tokens, outcome.differences) == (2, 6, ())


def test_a_greedy_difference_comes_with_the_gap_where_it_began() -> None:
    engine = Engine(5, 6, 7, 8)
    (one,) = recheck(cast(LLM, engine), [case(5, 9, 7, 9)], is_eager=True).differences
    assert (one.workload, one.request, one.num_tokens) == ("nano", 3, 4)
    assert (one.first, one.in_run, one.alone, one.num_different) == (1, 9, 6, 2)
    assert one.logit_gap == 0.25
    assert engine.prompts == [[1, 2], [1, 2, 5]]  # the gap is asked for where they parted


def test_a_drawn_difference_has_no_gap() -> None:
    (one,) = recheck(cast(LLM, Engine(5, 6)), [case(5, 9, temperature=0.6)], is_eager=True).differences
    assert (one.first, one.logit_gap) == (1, None)


def test_an_output_that_ends_early_differs_where_it_ends() -> None:
    (one,) = recheck(cast(LLM, Engine(5)), [case(5, 9, 9)], is_eager=False).differences
    assert (one.first, one.in_run, one.alone, one.num_different) == (1, 9, -1, 2)


def test_what_was_measured_is_written_when_a_later_part_fails(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    report = Report(kind="throughput", model="tiny", startup_s=1.0, engine={}, facts=FACTS, gpu=None)

    def fail_later() -> None:
        with write(report, target) as save:
            report.results.append({"workload": "nano", "seconds": 1.23456789})
            save()
            assert json.loads(target.read_text())["results"] == [{"workload": "nano", "seconds": 1.23457}]
            raise ZeroDivisionError("out of memory")

    with pytest.raises(ZeroDivisionError):
        fail_later()
    value = json.loads(target.read_text())
    assert value["error"] == "ZeroDivisionError: out of memory" and len(value["results"]) == 1


def test_a_file_that_cannot_be_written_is_told_beforehand(tmp_path: Path) -> None:
    assert writable("--json", None) is None
    assert writable("--json", str(tmp_path / "new.json")) == tmp_path / "new.json"
    with pytest.raises(InputError, match="that is a folder"):
        writable("--json", str(tmp_path))
    with pytest.raises(InputError, match="give the name of a file"):
        writable("--json", "-")


def test_a_table_without_a_library() -> None:
    grid = Grid(headings=("workload", "seconds"), rows=[("nano", "12.345"), ("decode-b1", "1.000")])
    assert plain_lines(grid) == [
        "workload   seconds",
        "---------  -------",
        "nano        12.345",
        "decode-b1    1.000",
    ]


def test_figures_of_a_narrow_kv_cache_say_so() -> None:
    def title(kv_dtype: str) -> str:
        sizes = {"dtype": "bfloat16", "kv_cache_dtype": kv_dtype}
        card = {"name": "a card"}
        return Report(kind="latency", model="tiny", startup_s=1.0, engine=sizes, facts=FACTS, gpu=card).title

    assert title("bfloat16") == "tiny on a card, ready after 1.00 s"
    assert title("fp8_e4m3") == "tiny on a card, KV cache in fp8_e4m3, ready after 1.00 s"
