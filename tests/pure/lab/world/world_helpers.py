"""A world small enough to reckon by hand: replicas whose tokens take as long whatever else they do."""

from __future__ import annotations

from typing import Any

from paceline.lab.world.curve import POINTS, ReplicaCurve
from paceline.lab.world.world_file import World, read_world

# 10 tokens at 0.1 s, 100 rows: 100 requests/s, of which prompts take a tenth of the device.
CURVE = ReplicaCurve(
    prompt_tokens=10.0,
    output_tokens=100.0,
    output_variation=0.5,
    rate=9.0,
    max_rows=100.0,
    prompt_s=0.01,
    chunk_s=0.1,
    rows=(1.0, 100.0),
    token_s=(0.1, 0.1),
    rates=(1.0, 9.0),
    ttft_s=(tuple(0.1 for _ in range(POINTS)), tuple(0.2 for _ in range(POINTS))),
)


def description(**changes: Any) -> dict[str, Any]:
    """Two regions of 32 replicas, half a day apart."""
    one = {
        "name": "west",
        "clock": 0,
        "replicas": 32,
        "peak_rate": 200,
        "night": 0.5,
        "peak_hour": 12,
        "device_hour_price": 2.0,
        "front_cores": 1,
    }
    return {
        "model": "llama-3.1-8b",
        "device": "h200",
        "trace": "fixed:10x100",
        "hours": 0.1,
        "cell": 16,
        "rack": 8,
        "slo": {"ttft_s": 1.0, "token_s": 1.0},
        "regions": [one, {"name": "east", "like": "west", "clock": 12}],
        "distances_ms": {"west": {"east": 100}},
        **changes,
    }


def world(**changes: Any) -> World:
    return read_world(description(**changes))
