"""Metrics as other tools read them: promtool, the rules and dashboards that come with the server, and its reference."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.service_class import CLASSES
from paceline.server.access.caller import LIMITS
from paceline.server.generate.request_record import RequestRecord, Times
from paceline.server.metrics.batching import PREEMPTIONS
from paceline.server.metrics.prometheus_page import name_prefix
from paceline.server.metrics.request_metrics import FINISH_REASONS, METHODS
from tools import dashboards, metric_pages

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
COLON = "metric names should not contain ':'"
# A histogram by its family.
NOT_SAMPLES = {"iteration_tokens_total"}
# A name of vLLM's that dashboards ask for, although a histogram should not be called a total.
VLLM_LINT = 'iteration_tokens_total non-counter metrics should not have "_total" suffix'


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        if os.environ.get("PACELINE_REQUIRE_PROMTOOL") == "1":
            pytest.fail("promtool is not there; it comes with Debian's package prometheus")
        pytest.skip("promtool is not there; it comes with Debian's package prometheus")
    return found


def run(*command: str, text: str | None = None) -> tuple[int, str]:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def page(prefix: str = "paceline") -> str:
    return metric_pages.full_application(prefix).metrics.render().decode()


def names_on(text: str) -> set[str]:
    """Every name a query may use."""
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_the_reference_is_what_the_server_says() -> None:
    assert metric_pages.PAGE.read_text(encoding="utf-8") == metric_pages.page(), "run make options"


def test_the_guide_names_metrics_that_there_are() -> None:
    guide = (ROOT / "docs" / "guides" / "metrics.md").read_text(encoding="utf-8")
    known = {name.removeprefix("paceline:") for name in names_on(page())} | NOT_SAMPLES
    ends = (
        r"_total|_share|_mean|_per_[a-z]+(?:_[a-z]+)?|_info|_perc|_running|_waiting|_rows|_flops|_occupancy"
    )
    named = set(re.findall(rf"`(?:paceline:)?([a-z0-9_]+(?:{ends}))`", guide))
    assert len(named) > 20 and named <= known, named - known


def test_promtool_takes_the_page(promtool: str) -> None:
    code, told = run(promtool, "check", "metrics", text=page("paceline_"))
    assert told.splitlines() == [f"paceline_{VLLM_LINT}"]
    assert code == 3
    _, told = run(promtool, "check", "metrics", text=page())
    rest = [line for line in told.splitlines() if COLON not in line]
    assert rest == [f"paceline:{VLLM_LINT}"]


def test_promtool_takes_the_rules(promtool: str) -> None:
    code, told = run(promtool, "check", "rules", str(RULES))
    assert code == 0, told
    code, told = run(promtool, "test", "rules", str(RULES.with_name("rules_test.yaml")))
    assert code == 0, told


def test_rules_name_metrics_that_there_are() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    known = names_on(page()) | {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        used = set(re.findall(r"paceline:[a-z0-9_:]+", rule["expr"]))
        assert used and used <= known, used - known


@pytest.mark.parametrize("prefix, begins", [("vllm", "vllm:"), ("vllm:", "vllm:"), ("own_", "own_")])
def test_the_prefix_is_a_word_with_a_colon_or_ends_with_an_underscore(prefix: str, begins: str) -> None:
    assert name_prefix(prefix) == begins
    assert f"\n{begins}num_requests_running{{" in page(prefix)


# ---------------------------------------------------------------- labels


def test_every_label_has_a_closed_set_of_values() -> None:
    app = metric_pages.full_application()
    before = page_labels(app.metrics.render().decode())
    for odd in ("x" * 100, 'a"b', "\n", "alice"):
        record = RequestRecord(id=odd, route=odd, tenant=odd, received_s=0.0)
        record.finish_reason = record.error_code = odd
        record.service_class = odd
        record.objectives = Times(1)
        app.requests.started(record)
        app.requests.finished(record)
        app.http.count("/v1/completions", odd, 200)
        app.http.count_refusal(odd, odd)
    after = page_labels(app.metrics.render().decode())
    after["method"].discard("other")
    assert after == before
    assert after["finished_reason"] == set(FINISH_REASONS)
    assert after["class"] == set(CLASSES) and after["limit"] == set(LIMITS)
    assert after["method"] <= set(METHODS)
    assert after["kind"] == {"recompute", "swap"}
    assert after["reason"] == {rule.partition(":")[0] for rule in PREEMPTIONS}


def page_labels(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found.setdefault(label, set()).add(value)
    return found


# ---------------------------------------------------------------- dashboards


@pytest.fixture(params=sorted(dashboards.pages()))
def board(request: pytest.FixtureRequest) -> Any:
    return json.loads((dashboards.FOLDER / request.param).read_text(encoding="utf-8"))


def panels_of(board: Any) -> Iterator[Any]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


def plain(query: str) -> str:
    """A query as Grafana sends it."""
    return query.replace("${prefix}", "paceline").replace("$__rate_interval", "5m").replace("$model", ".*")


def test_dashboards_are_what_their_description_makes() -> None:
    for name, text in dashboards.pages().items():
        assert (dashboards.FOLDER / name).read_text(encoding="utf-8") == text, "run make options"


def test_queries_name_metrics_that_there_are(board: Any) -> None:
    known = names_on(page())
    for panel in panels_of(board):
        for target in panel["targets"]:
            used = set(re.findall(r"paceline:[a-z0-9_]+", plain(target["expr"])))
            assert used and used <= known, (panel["title"], used - known)


def test_queries_are_promql(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{index}", "expr": plain(query)} for index, query in enumerate(dashboards.queries())
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    code, told = run(promtool, "check", "rules", "--lint=none", str(path))
    assert code == 0 and f"{len(rules)} rules found" in told, told


def test_panels_have_a_place_of_their_own_and_the_chosen_data_source(board: Any) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= dashboards.WIDTH
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels_of(board):
        assert panel["description"] and panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "prefix", "model"]


def test_grafanas_own_schema_takes_them(board: Any) -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="a tool of development")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    loaded = json.loads(json.dumps(models.Dashboard.from_json(board), cls=JSONEncoder))
    for name in ("uid", "title", "schemaVersion", "time", "refresh", "tags"):
        assert loaded[name] == board[name]
    assert len(loaded["panels"]) == len(board["panels"])
    for ours, theirs in zip(panels_of(board), panels_of(loaded), strict=True):
        for name in ("type", "title", "gridPos", "datasource", "description"):
            assert theirs[name] == ours[name]
        assert [each["expr"] for each in theirs["targets"]] == [each["expr"] for each in ours["targets"]]
        assert theirs["fieldConfig"]["defaults"]["unit"] == ours["fieldConfig"]["defaults"]["unit"]
