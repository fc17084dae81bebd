"""Policies in the simulator: the example of the reference page runs, by name, as an operator would try it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from paceline.cli.main import run
from paceline.config.engine import POLICIES
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "policies.md"
SMALL = ["--num-requests", "30", "--trace", "multi-tenant", "--num-blocks", "600"]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the page's policy, importable."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page_policies.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "page_policies", raising=False)
    return "page_policies:SmallTenantsFirst"


def test_the_example_of_the_page_orders_as_it_says(example: str) -> None:
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy=example))
    crowd = [bench.add(prompt(3), 2, tenant="crowd") for _ in range(3)]
    single = bench.add(prompt(3), 2, tenant="single")
    bench.run()
    assert list(bench.finished) == [single, *crowd]


@pytest.mark.parametrize("name", [*POLICIES, "the page's"])
def test_every_policy_runs_in_the_simulator(
    name: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = example if name == "the page's" else name
    code, printed = run(["sim", *SMALL, "--scheduling-policy", chosen]), capsys.readouterr()
    assert code == 0, printed.err
    assert "30" in printed.out


@pytest.mark.parametrize("spec", ["no_such_policies:Thing", "json:JSONDecoder"])
def test_a_class_that_is_no_policy_is_refused_with_a_sentence(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sim", *SMALL, "--scheduling-policy", spec]) != 0
    assert "--scheduling-policy" in capsys.readouterr().err


def test_the_page_names_every_policy() -> None:
    text = PAGE.read_text()
    assert [name for name in POLICIES if f"| `{name}` |" not in text] == []


def test_the_table_separates_classes_tenants_and_kinds_of_preemption(tmp_path: Path) -> None:
    load = ["--trace", "multi-tenant", "--num-requests", "120", "--rate", "60", "--num-blocks", "200"]
    flags = [
        "--priorities",
        "random:2",
        "--scheduling-policy",
        "priority",
        "--json",
        str(tmp_path / "run.json"),
    ]
    assert run(["sim", *load, *flags]) == 0
    (one,) = json.loads((tmp_path / "run.json").read_text())["runs"]
    found = one["summary"]
    assert set(found["queue_delay_by_class_s"]) == {"priority 0", "priority 1"}
    first, last = (found["queue_delay_by_class_s"][f"priority {level}"]["mean"] for level in (0, 1))
    assert first < last
    assert found["preemptions"] == sum(found["preempted_by"].values()) > 0
    assert found["fairness_gap"] > 0
