"""Files and batches over an engine that says what a test wrote down, without HTTP and without a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.server import BatchConfig
from paceline.process.client import EngineStats
from paceline.server.access.caller import Caller
from paceline.server.api.batch_routes import BatchApi
from paceline.server.api.openai_fields import CHAT
from paceline.server.api.routes import routes
from paceline.server.batches.batch_records import Batch
from paceline.server.batches.batch_store import Store
from paceline.server.batches.batches import Batches, BatchSettings
from tests.pure.server_api.api_helpers import Api, FakeClient, Script

BOUNDARY = "----a-boundary"
TENANT = "default"
OVER = ("completed", "failed", "expired", "cancelled")


def form(
    content: bytes = b"{}\n", *, purpose: str = "batch", name: str = "file", filename: str = "in.jsonl"
) -> bytes:
    """The body of an upload, as clients send it."""
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n'
        f"Content-Type: application/octet-stream\r\n\r\n"
    ).encode() + (content + f"\r\n--{BOUNDARY}--\r\n".encode())


CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


async def pieces(data: bytes, size: int = 65_536) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def request(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class LoadedClient(FakeClient):
    """An engine that says of itself what a test says."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.waiting = 0

    @property
    def stats(self) -> EngineStats:  # type: ignore[override]
        return EngineStats(waiting=self.waiting)


class World:
    """One server's worth of files and batches. To be made on a running event loop, and closed."""

    def __init__(self, folder: Path, script: Script, client: LoadedClient | None = None) -> None:
        self.client = client or LoadedClient(script)
        self.api = Api()
        self.api.client = self.api.service.client = self.client
        self.log = self.api.listener
        self.now_s = 1_000_000.0
        self.callers: dict[str, Caller] = {TENANT: Caller(), "other": replace(Caller(), tenant="other")}
        self.store = Store(folder, clock=lambda: self.now_s)
        settings = BatchSettings(
            config=BatchConfig(batch_dir=str(folder)),
            max_line_bytes=2**20,
            callers=self.callers.get,
            tick_s=0.001,
            retry_s=0.001,
        )
        self.batches = Batches(self.api.service, routes(self.api.service), self.store, settings)
        self.batch_api = BatchApi(self.batches)

    async def __aenter__(self) -> World:
        self.batches.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.batches.stop()

    async def upload(self, content: bytes, tenant: str = TENANT) -> str:
        taken = await self.batch_api.upload(tenant, CONTENT_TYPE, pieces(form(content)))
        return taken.file.id

    async def begin(self, *lines: dict[str, Any], tenant: str = TENANT, endpoint: str = CHAT) -> str:
        file_id = await self.upload(jsonl(*lines), tenant)
        return (await self.batch_api.begin(tenant, input_file_id=file_id, endpoint=endpoint)).id

    async def state(self, batch_id: str) -> Batch:
        found = await self.store.ask(lambda db: db.batch(batch_id))
        assert found is not None
        return found

    async def wait(self, batch_id: str, *states: str) -> Batch:
        async def over() -> bool:
            return (await self.state(batch_id)).status in (states or OVER)

        await until(over)
        return await self.state(batch_id)

    async def results(self, file_id: str | None, tenant: str = TENANT) -> dict[str, Any]:
        if file_id is None:
            return {}
        _, path = await self.batch_api.content(tenant, file_id)
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines), "a request has two results"
        return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.001)
