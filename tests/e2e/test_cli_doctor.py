"""`paceline doctor` as a user runs it, on this machine and on one that is not well."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

import paceline
from paceline.cli.doctor import find_problems
from tests.e2e.model_cli import run

KERNELS = {"isa": "neon", "title": "neon dotprod", "missing": [], "gops_per_core": 70.0, "error": None}
WELL = {
    "versions": {"paceline": "1", "python": "3.11", "numba": "0.68", "numpy": "2"},
    "cpu": {"cores": 4, "threads": 4, "kernels": KERNELS, "instructions": {}, "is_busy": False},
    "memory": {"total_bytes": 2**34, "available_bytes": 2**33},
    "cache": {"path": "/c", "free_bytes": 2**40, "is_writable": True},
    "default_model": {"path": None},
    "gpus": [],
    "gpu_error": None,
    "environment": {},
}


def with_kernels(**changes: object) -> dict[str, object]:
    return {"cpu": {**WELL["cpu"], "kernels": {**KERNELS, **changes}}}  # type: ignore[dict-item]


def test_this_machine(tmp_path: Path) -> None:
    shown = run("doctor", cache=tmp_path, HF_TOKEN="hf_secret")
    assert shown.returncode == 0, shown.stderr
    for text in (
        *(
            f"paceline {paceline.__version__}",
            f"python {platform.python_version()}",
            "numba 0.",
            "tokenizers ",
        ),
        *(
            "cores",
            "instructions",
            "CPU kernels",
            "memory",
            "GPU",
            str(tmp_path),
            "not downloaded",
        ),
        *("OMP_NUM_THREADS=1", "HF_TOKEN=(set, not shown)"),
    ):
        assert text in shown.stdout, text
    assert "hf_secret" not in shown.stdout
    facts = json.loads(run("doctor", "--json", cache=tmp_path).stdout)
    assert facts["versions"]["paceline"] == paceline.__version__
    assert facts["cpu"]["kernels"]["isa"] and not facts["cpu"]["kernels"]["error"]
    assert facts["cpu"]["threads"] >= 1 and facts["memory"]["available_bytes"] > 0
    assert facts["cache"]["path"] == str(tmp_path / "models") and facts["default_model"] == {"path": None}
    assert facts["environment"]["PACELINE_CACHE_ROOT"] == str(tmp_path)
    assert all(set(problem) == {"problem", "is_broken"} for problem in facts["problems"])


def test_something_broken_is_named_and_fails(tmp_path: Path) -> None:
    done = run("doctor", cache=tmp_path, PACELINE_CPU_KVCACHE_SPACE="lots")
    assert done.returncode == 1
    assert "BROKEN: PACELINE_CPU_KVCACHE_SPACE is 'lots'; set it to a number of GiB" in done.stdout


def test_instructions_that_are_not_there_are_broken_as_every_start_is(tmp_path: Path) -> None:
    done = run("doctor", cache=tmp_path, PACELINE_CPU_ISA="sse9")
    assert done.returncode == 1
    assert "PACELINE_CPU_ISA=sse9\n" in done.stdout and "not compiled yet" not in done.stdout
    (broken,) = (line for line in done.stdout.splitlines() if line.startswith("BROKEN: "))
    assert broken.startswith("BROKEN: PACELINE_CPU_ISA=sse9: this processor can take ")
    assert broken.endswith("plain; set it to one of these, or remove it")


def test_nothing_is_said_of_a_machine_that_is_well() -> None:
    assert find_problems(WELL) == []


@pytest.mark.parametrize(
    ("changes", "says", "is_broken"),
    [
        ({"versions": {"numba": None}}, "numba is not installed", True),
        (with_kernels(error="OSError: libz"), "cannot be used (OSError: libz)", False),
        (with_kernels(isa="plain", missing=["asimddp"]), "this processor has no asimddp", False),
        (with_kernels(isa="plain"), "PACELINE_CPU_ISA asks for plain: the CPU kernels", False),
        ({"cpu": {**WELL["cpu"], "is_busy": True, "used_by_others": 1.8}}, "use 1.8 of 4 cores", False),  # type: ignore[dict-item]
        ({"gpus": ["H200"], "gpu_error": "Triton is not installed"}, "the GPU is not used: Triton", False),
        ({"memory": {"available_bytes": 2**29}}, "less than 1 GiB of memory", False),
        ({"cache": {"path": "/c", "free_bytes": 2**40, "is_writable": False}}, "cannot be written", True),
        ({"cache": {"path": "/c", "free_bytes": 2**20, "is_writable": True}}, "has no room", True),
        ({"environment": {"PACELINE_CPU_KVCACHE_SPACE": "-1"}}, "above 0", True),
        ({"environment": {"PACELINE_CPU_KVCACHE_SPACE": "99"}}, "more than the free memory", False),
    ],
)
def test_problems_are_named(changes: dict[str, object], says: str, is_broken: bool) -> None:
    (problem,) = find_problems({**WELL, **changes})
    assert says in problem.text and problem.is_broken == is_broken


def test_a_read_only_cache_is_no_problem_where_the_model_is_there() -> None:
    cache = {"path": "/c", "free_bytes": 0, "is_writable": False}
    assert find_problems({**WELL, "cache": cache, "default_model": {"path": "/c/model.gguf"}}) == []
