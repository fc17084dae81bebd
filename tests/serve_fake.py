"""A whole server process without a model: the real listener, application and lifecycle around made-up routes.

    python -m tests.serve_fake '{"port": 0, "drain_timeout_s": 1.0}'

Prints one line of JSON with its port when it serves. The engine is a fake that is ready after `load_s` seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable

import uvloop

from paceline.config.server import ServerConfig
from paceline.process.client import EngineInfo, EngineState, EngineStats, EngineUnavailable
from paceline.server.access.keys_file import read_keys
from paceline.server.api.route import Route
from paceline.server.app import Api, Application
from paceline.server.call import Answer, Call, Events, Handler
from paceline.server.errors import openai_error_frame
from paceline.server.http.listener import Listener, bind_tcp
from paceline.server.lifecycle import Server
from paceline.server.logs import set_up_logs
from tests.fake_engine import IdleClient, engine_info


class FakeClient(IdleClient):
    """An engine that is only looked at."""

    def __init__(self) -> None:
        self.state = EngineState.STARTING
        self.stats = EngineStats(running=2, blocks_used=3, blocks_total=8)

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        if self.state is EngineState.STARTING:
            raise EngineUnavailable("loading", code="starting")
        return engine_info()


class FakeEngine:
    """Loads for a while; is lost when told."""

    def __init__(self, load_s: float) -> None:
        self.client = FakeClient()
        self.on_lost: Callable[[str], None] | None = None
        self._load_s = load_s

    async def wait_ready(self) -> None:
        await asyncio.sleep(self._load_s)
        self.client.state = EngineState.READY

    async def stop(self) -> None:
        self.client.state = EngineState.STOPPED


class Routes:
    """Handlers that echo, stream, wait and crash, and count what became of them."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.counts = dict.fromkeys(("started", "cancelled", "ended", "closed", "frames"), 0)

    async def echo(self, call: Call) -> Answer:
        if call.allowance is not None and "tokens" in call.body:
            call.allowance.charge_tokens(call.body["tokens"], 0)
        body = {"body": call.body, "id": call.id, "tenant": call.caller.tenant, "path": call.path}
        return Answer(
            body=json.dumps(body).encode(),
            headers={"x-paceline-ignored-fields": str(call.body.get("header", "a, b"))},
        )

    async def crash(self, call: Call) -> Answer:
        raise RuntimeError("the secret of the inside")

    async def slow(self, call: Call) -> Answer:
        self.counts["started"] += 1
        try:
            await asyncio.sleep(float(call.body.get("seconds", 60)))
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        self.counts["ended"] += 1
        return Answer(body=b"{}")

    async def stream(self, call: Call) -> Events:
        return Events(
            frames=self._frames(call), error_frame=openai_error_frame, headers=lambda: {"x-extra": "yes"}
        )

    async def _frames(self, call: Call) -> AsyncGenerator[bytes, None]:
        body = call.body
        self.counts["started"] += 1
        try:
            await asyncio.sleep(float(body.get("first_s", 0)))
            for index in range(int(body.get("count", 3))):
                if index == body.get("fail_at"):
                    raise RuntimeError("the secret of the inside")
                if index == body.get("busy_at"):
                    raise EngineUnavailable("gone")
                self.counts["frames"] += 1
                yield b"data: %d %s\n\n" % (index, b"x" * int(body.get("size", 0)))
                if "pause_s" in body:
                    await asyncio.sleep(float(body["pause_s"]))
            yield b"data: [DONE]\n\n"
            self.counts["ended"] += 1
        finally:
            self.counts["closed"] += 1

    async def seen(self, call: Call) -> Answer:
        descriptors = len(os.listdir("/proc/self/fd"))
        return Answer(
            body=json.dumps({**self.counts, "tasks": len(asyncio.all_tasks()), "fds": descriptors}).encode()
        )

    async def lose(self, call: Call) -> Answer:
        assert self._engine.on_lost is not None
        asyncio.get_running_loop().call_later(0.1, self._engine.on_lost, "told to")
        return Answer(body=b"{}")

    def table(self) -> list[Route]:
        posts: dict[str, Handler] = {
            "/v1/echo": self.echo,
            "/v1/crash": self.crash,
            "/v1/slow": self.slow,
            "/v1/stream": self.stream,
        }
        return [
            *(
                Route(
                    methods=("POST",),
                    path=path,
                    handler=handler,
                    takes_body=True,
                    is_generation=True,
                    openapi={"summary": "Made up"},
                )
                for path, handler in posts.items()
            ),
            Route(methods=("POST",), path="/v1/lose", handler=self.lose, takes_body=True),
            Route(methods=("GET",), path="/v1/seen", handler=self.seen, takes_body=False),
            Route(
                methods=("GET",),
                path="/v1/admin/seen",
                handler=self.seen,
                takes_body=False,
                needs_admin=True,
            ),
            Route(
                methods=("GET",),
                path="/v1/models/{id:path}",
                handler=self.echo,
                takes_body=False,
                openapi={"summary": "Made up"},
            ),
        ]


def main() -> None:
    given = json.loads(sys.argv[1])
    load_s = given.pop("load_s", 0.0)
    config = ServerConfig(**{"port": 0, "log_format": "json", **given})
    keyring = read_keys(config.api_keys_file)
    engine = FakeEngine(load_s)
    routes = Routes(engine)
    bound = bind_tcp(config.host, config.port)
    side = None if config.metrics_port is None else bind_tcp(config.metrics_host, config.metrics_port)
    output = set_up_logs(config.log_format, config.log_level)

    async def open_api() -> Api:
        return Api(routes=routes.table(), model_name="fake")

    async def serve() -> int:
        app = Application(config, engine.client, keyring)
        app.dropped_lines = lambda: output.dropped
        listeners = [Listener(app.main, bound, config)]
        if side is not None and app.side is not None:
            listeners.append(Listener(app.side, side, config))
        server = Server(
            config,
            engine,
            app,
            open_api=open_api,
            on_ready=lambda info: None,
            read_keys=lambda: read_keys(config.api_keys_file),
        )
        ports = {"port": bound.getsockname()[1], "side": side.getsockname()[1] if side else None}
        print(json.dumps(ports), flush=True)
        return await server.run(listeners)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve())
    output.finish()
    sys.exit(code)


if __name__ == "__main__":
    main()
