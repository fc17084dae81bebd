"""Writes docs/reference/metrics.md: every metric a server can show, as the server itself describes it.

`python -m tools.metric_pages` writes the page; a test compares it with what it would write. The metrics come from an
application with everything switched on, around an engine that is only described.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from paceline.config.server import ObserveConfig, ServerConfig
from paceline.core.adapter import AdapterInfo
from paceline.core.counters import AdapterStats, Counters, CPUWork, LevelUse, SlabUse
from paceline.core.dial import DialStatus
from paceline.costs.cost_model import ModelWork
from paceline.process.client import EngineState, EngineStats
from paceline.process.fleet.fleet import Fleet, Member
from paceline.server.access.keys_file import Keyring
from paceline.server.app import Api, Application
from paceline.server.batches.batches import Batches
from paceline.server.billing.billing import Billing
from paceline.server.generate.request_admission import RequestAdmission, ServerCapacity
from paceline.server.generate.request_record import RequestRecord
from paceline.server.metrics.tracing import Tracing
from paceline.server.open_api import admission_gauges
from tests.fake_engine import engine_info

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"
MODEL = "a-model"
# Names that vLLM has too, with its labels, its buckets and its meaning.
VLLM = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config"),
        *(
            "engine_sleep_state",
            "lora_requests_info",
            "prompt_tokens_by_source",
            "num_preemptions",
            "prompt_tokens",
            "prompt_tokens_cached",
            "generation_tokens",
            "request_success",
        ),
        *("prefix_cache_queries", "prefix_cache_hits", "iteration_tokens_total"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
        *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
        *("request_params_n", "request_params_max_tokens", "request_prefill_kv_computed_tokens"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu"),
    }
)
SUFFIXES = {"counter": "_total", "info": "_info"}
HEAD = """# Metrics

Generated from a running server by `make options`. All names begin with `paceline:`, or with the \
`--metrics-prefix`. A counter's name ends with `_total`, a histogram has `_bucket`, `_sum` and `_count`. Every \
label has a closed set of values, which clients cannot extend. How to use them: [the guide](../guides/metrics.md).
"""


class DescribedEngine:
    """An engine that has run a little, on a device whose peak is known."""

    state = EngineState.READY
    heartbeat_age_s = 0.1

    def __init__(self) -> None:
        self.info = engine_info(
            device="NVIDIA H200",
            work=ModelWork(
                token_flops=2e9, product_flops=1e3, logit_flops=1e6, kv_token_bytes=1e3, step_bytes=1e9
            ),
        )
        self.stats = EngineStats()
        self.adapters = {
            "an-adapter": AdapterInfo(name="an-adapter", folder="", number=1, identity="", rank=8)
        }

    def run(self) -> None:
        """A second of work."""
        self.stats = EngineStats(
            running=3,
            steps=10,
            busy_s=0.5,
            counters=Counters(computed_tokens=100, occupied_rows=20),
            fairness_gap=1.0,
            next_place_s=1.0,
            dial=DialStatus(),
            cpu=CPUWork(2, {"products": 0.5, "waiting": 0.1}),
            adapters=AdapterStats(running=(1,), resident=1),
            slabs=SlabUse(2, 3, 8),
            below=(LevelUse("disk", 1, 2, 3, hits=16, stored=2, loaded=1, failed=0, is_off=False),),
        )


def full_application(prefix: str = "paceline") -> Application:
    """A server that shows all it can."""
    engine = DescribedEngine()
    config = ServerConfig(
        metrics_prefix=prefix, observe=ObserveConfig(slo_ttft_ms=100.0, slo_e2e_ms=1000.0, cost_per_hour=2.0)
    )
    app = Application(config, cast(Any, engine), Keyring(()))
    ledger = SimpleNamespace(problem="", num_entries=0, num_writes=0)
    billing = cast(Billing, SimpleNamespace(ledger=ledger))
    counts = ({"completed": 0}, {"pending": 0, "in_progress": 0})
    batches = cast(Batches, SimpleNamespace(_counts=counts, num_lines_under_way=0))
    admission = RequestAdmission(ServerCapacity(places=1, queued_tokens=1), lambda: None)
    recent = app.batching.recent
    recent.note(recent.totals()._replace(time_s=time.monotonic() - 30.0))
    one = Member(0, cast(Any, SimpleNamespace(state=EngineState.READY, stats=EngineStats())))
    described = {"routed": {"soonest": 0}, "failovers": {"resumed": 0}, "output_tokens": {0: 0}}
    app.metrics.fleet = cast(Fleet, SimpleNamespace(**described, members=[one]))
    app.become_ready(
        Api(
            routes=[],
            model_name=MODEL,
            gauges=lambda: [*admission_gauges([admission]), *Billing.gauges(billing)],
            labelled=lambda: Batches.figures(batches),
        )
    )
    app.more_counters = lambda: Tracing.figures(cast(Tracing, SimpleNamespace(num_exported=0, num_dropped=0)))
    app.http.count("/v1/completions", "POST", 200)
    _work_a_little(app, engine)
    return app


def _work_a_little(app: Application, engine: DescribedEngine) -> None:
    """Some work and a request, for figures that need them."""
    now_s = time.monotonic()
    engine.run()
    record = RequestRecord(id="1", route="/v1/completions", tenant="t", received_s=now_s - 1.0)
    record.num_prompt, record.num_output, record.finish_reason = 5, 5, "stop"
    app.requests.started(record)
    record.first_token_s, record.finished_s = now_s - 0.5, now_s
    app.requests.tokens(record, 5, now_s)
    app.requests.finished(record)


def page() -> str:
    app = full_application()
    rows: dict[bool, list[str]] = {True: [], False: []}
    for family in app.metrics.collect():
        name = family.name.removeprefix("paceline:")
        shown = ", ".join(f"`{label}`" for label in family.samples[0].labels if label != "le")
        kind = "gauge" if family.type == "info" else family.type
        line = f"| `{name}{SUFFIXES.get(family.type, '')}` | {kind} | {shown} | {family.documentation} |"
        rows[name in VLLM].append(line)
    head = "| name | type | labels | meaning |\n|---|---|---|---|\n"
    return (
        f"{HEAD}\n## As vLLM has them\n\n{head}" + "\n".join(rows[True]) + "\n\n"
        f"## Others\n\n{head}" + "\n".join(rows[False]) + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
