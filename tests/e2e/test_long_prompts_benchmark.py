"""The benchmark of long prompts starts the server it measures, and every client of it is answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.long_prompts import Load, _offered, on_a_server
from tests.model_folder import write_model


@pytest.mark.campaign
def test_a_server_is_measured(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", max_position_embeddings=8192)
    load = Load(tokens=4400, streams=2, rate=4.0, seconds=2.0)
    alone, without, beside = on_a_server(str(folder), load)
    assert alone["TTFT of the long one, s"] > 0 and beside["TTFT of the long one, s"] > 0
    assert without["ITL p99, ms"] > 0 and without["short TTFT p50, ms"] > 0


def test_an_error_in_a_stream_is_no_token() -> None:
    """What takes too long ends with one, behind a status that has been sent."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"code":"queue_timeout"}}\n\n')
        writer.close()

    async def measured() -> object:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            return await _offered(server.sockets[0].getsockname()[1], Load(tokens=8))

    with pytest.raises(AssertionError, match="a prompt of 8 tokens: .*queue_timeout"):
        asyncio.run(measured())
