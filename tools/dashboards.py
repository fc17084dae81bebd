"""Writes deploy/grafana/*.json: the dashboards, from a short description of their panels.

`python -m tools.dashboards` writes them; a test compares them with what it would write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.dashboard_panels import BOARDS, PREFIX, Board, Panel

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
WIDTH, HEIGHT, ROW_HEIGHT = 24, 8, 1
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


def dashboard(board: Board) -> Json:
    """A board as Grafana reads it."""
    return {
        "uid": f"paceline-{board.name}",
        "title": board.title,
        "description": board.text,
        "tags": ["paceline"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels(board)),
    }


def _variables() -> list[Json]:
    names = ("paceline", "vllm")
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "refresh": 1,
        },
        {
            "name": "prefix",
            "label": "Prefix",
            "type": "custom",
            "query": ",".join(names),
            "current": {"text": names[0], "value": names[0], "selected": True},
            "options": [{"text": name, "value": name, "selected": name == names[0]} for name in names],
            "hide": 0,
        },
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": SOURCE,
            "query": f"label_values({PREFIX}num_requests_running, model_name)",
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all", "selected": True},
            "hide": 0,
            "refresh": 2,
            "sort": 1,
        },
    ]


def _panels(board: Board) -> Iterator[Json]:
    number, top = 1, 0
    for title, panels in board.rows:
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": ROW_HEIGHT},
            "panels": [],
        }
        number, top, left = number + 1, top + ROW_HEIGHT, 0
        height = HEIGHT
        for panel in panels:
            height = 4 if panel.kind == "stat" else HEIGHT
            if left + panel.width > WIDTH:
                top, left = top + height, 0
            yield _panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": height})
            number, left = number + 1, left + panel.width
        top += height


def _panel(panel: Panel, number: int, place: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or panel.title,
                "format": query.format,
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _defaults(panel: Panel) -> Json:
    found: Json = {"unit": panel.unit}
    if panel.kind != "timeseries":
        return found
    if panel.low is not None:
        found["min"] = panel.low
    if panel.high is not None:
        found["max"] = panel.high
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    fill = 20 if panel.stacked else 0
    return found | {
        "custom": {"drawStyle": "line", "lineWidth": 1, "fillOpacity": fill, "stacking": stacking}
    }


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "legend": {"show": True}}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def pages() -> dict[str, str]:
    """The files, by their names."""
    return {f"{board.name}.json": json.dumps(dashboard(board), indent=2) + "\n" for board in BOARDS}


def queries(boards: Sequence[Board] = BOARDS) -> list[str]:
    """Every query of the boards."""
    return [
        query.expr
        for board in boards
        for _, panels in board.rows
        for panel in panels
        for query in panel.queries
    ]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
