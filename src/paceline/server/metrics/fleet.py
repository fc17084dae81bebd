"""Metrics of several engines behind one server; what is the sum of all engines stands where one engine's stands."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from paceline.process.client import EngineState
from paceline.process.fleet import Fleet
from paceline.server.metrics.families import LABELS, Families


def fleet_families(fleet: Fleet, make: Families, model_name: str) -> Iterable[Metric]:
    yield make.counter_by("rule", "routed", "Requests by the rule that chose their engine.", fleet.routed)
    text = "Requests whose engine was lost: resumed behind their output, restarted, or given up."
    yield make.counter_by("outcome", "failovers", text, fleet.failovers)
    ready, running, waiting, usage = {}, {}, {}, {}
    for member in fleet.members:
        key, stats = (model_name, str(member.number)), member.engine.stats
        ready[key] = float(member.engine.state is EngineState.READY)
        running[key], waiting[key] = float(stats.running), float(stats.waiting)
        usage[key] = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    yield make.gauge("fleet_engine_up", "1 when this engine takes requests.", ready, *LABELS)
    yield make.gauge("fleet_requests_running", "Requests in the batch of this engine.", running, *LABELS)
    yield make.gauge("fleet_requests_waiting", "Requests that wait in this engine.", waiting, *LABELS)
    yield make.gauge("fleet_kv_cache_usage_perc", "Share of its KV blocks in use, 0 to 1.", usage, *LABELS)
