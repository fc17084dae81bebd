"""The benchmark of long prompts starts the server it measures, and every client of it is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long_prompts import Load, on_a_server
from tests.model_folder import write_model


@pytest.mark.campaign
def test_a_server_is_measured(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", max_position_embeddings=8192)
    load = Load(tokens=4400, streams=2, rate=4.0, seconds=2.0)
    alone, without, beside = on_a_server(str(folder), load)
    assert alone["TTFT of the long one, s"] > 0 and beside["TTFT of the long one, s"] > 0
    assert without["ITL p99, ms"] > 0 and without["short TTFT p50, ms"] > 0
