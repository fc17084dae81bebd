"""What the benchmarks share: parts of a command with their flags, runs in turns, spreads, tables, servers and results.

    bench = Benchmark(__doc__)

    @bench.part(flag("--rounds", 7, "runs of each variant"))
    def trail(given): ...

    if __name__ == "__main__":
        bench.main()

A single part is the whole command; several parts are chosen by name. What a part returns is printed as one line of
JSON, and written to --json FILE together with hardware, versions, commit and command.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import http.client
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from paceline.cli.doctor import processor_name
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.bench.machine import source_commit
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload.workload import Workload

if TYPE_CHECKING:
    from paceline.lab.bench.load.pool import Target

HOST = "127.0.0.1"
START_S, STOP_S = 300.0, 60.0
PYTHON = (sys.executable, "-m")
TEXT = Path(__file__).resolve().parents[1] / "LICENSE"  # English prompts are cut from it
GREEDY = {"temperature": 0, "ignore_eos": True}  # fields of a request: the same work in every run
Given = argparse.Namespace
Found = dict[str, Any]
Flag = tuple[str, dict[str, Any]]
Part = Callable[[Given], Found | None]
T = TypeVar("T")


# -- commands ------------------------------------------------------------------------------------------------


def flag(name: str, default: Any = None, help: str = "", *, kind: type | None = None, **more: Any) -> Flag:
    """An argument; its type is that of its default, a default of False makes it a switch."""
    if isinstance(default, bool):
        return name, {"action": "store_true", "help": help}
    named = {"default": default} if name.startswith("-") or more.get("nargs") else {}
    return name, {**named, "type": kind or (str if default is None else type(default)), "help": help, **more}


class Benchmark:
    """One file of benchmarks: its parts, and the command line that runs them."""

    def __init__(self, description: str | None) -> None:
        self._description = description
        self._parts: dict[str, tuple[Part, tuple[Flag, ...]]] = {}

    def part(self, *flags: Flag) -> Callable[[Part], Part]:
        def add(run: Part) -> Part:
            self._parts[run.__name__.replace("_", "-")] = (run, flags)
            return run

        return add

    def main(self) -> Found:
        raw = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=self._description, formatter_class=raw)
        commands = parser.add_subparsers(required=True, metavar="PART") if len(self._parts) > 1 else None
        for name, (run, flags) in self._parts.items():
            own = parser
            if commands is not None:
                about = (run.__doc__ or "").strip()
                own = commands.add_parser(name, help=about.split("\n")[0], description=about)
            for argument, options in flags:
                own.add_argument(argument, **options)
            own.add_argument("--json", type=Path, help="file for the figures, with hardware and commit")
            own.set_defaults(run=run)
        given = parser.parse_args()
        found = given.run(given) or {}
        if found:
            print(json.dumps(found, default=str))
        if given.json is not None:
            text = json.dumps({"environment": environment(), **found}, indent=1, default=str)
            given.json.write_text(text + "\n", encoding="utf-8")
        return found


def environment() -> Found:
    """What a result must carry to mean anything later."""
    found: Found = {
        "machine": platform.machine(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": source_commit(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            from paceline.lab.bench.machine import accelerator, triton_version

            found |= {"gpu": accelerator(), "triton": triton_version()}
    return found


# -- figures -------------------------------------------------------------------------------------------------


def in_turns(works: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Each work once in every round, so that a machine that slows down slows all of them."""
    found: dict[str, list[T]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    return found


def spread(values: Sequence[float], digits: int = 2) -> Found:
    if not len(values):
        return {"count": 0}
    shares = np.percentile(values, (50, 90, 99, 100))
    named = zip(("p50", "p90", "p99", "max"), shares.tolist(), strict=True)
    return {"count": len(values)} | {name: round(value, digits) for name, value in named}


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def table(*names: str) -> None:
    """The head of a table; `row` prints its rows as they come."""
    row(*names)
    row(*("---" for _ in names))


def row(*cells: object) -> None:
    shown = (f"{cell:,.4g}" if isinstance(cell, float) and abs(cell) < 1e3 else cell for cell in cells)
    print(
        "| " + " | ".join(f"{c:,.0f}" if isinstance(c, float) else str(c) for c in shown) + " |", flush=True
    )


def rows_of(results: Iterable[Found]) -> list[Found]:
    """The results, each printed as a row of one table as it comes."""
    found: list[Found] = []
    for result in results:
        if not found:
            table(*result)
        row(*result.values())
        found.append(result)
    return found


# -- the simulator -------------------------------------------------------------------------------------------

ENGINE: Found = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
TRACE_FLAG = flag("--trace", "azure-conv", "trace of conversations, or a generator fitted to it")
TENANTS_FLAG = flag("--tenants", "multi-tenant", "trace of many clients, or a generator fitted to it")


@cache
def h200() -> Machine:
    """An 8B model on a modelled H200."""
    return Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))


def simulated(
    workload: Workload,
    options: Mapping[str, Any],
    *,
    label: str = "",
    machine: Machine | None = None,
    **sim: Any,
) -> RunRecord:
    machine = machine or h200()
    engine = engine_config(machine, workload, dict(options))
    return simulate(SimConfig(machine=machine, engine=engine, **sim), workload, label=label)


def at_once(workload: Workload) -> Workload:
    """The same requests, all there from the start."""
    return replace(workload, arrival_s=np.zeros(len(workload)))


def one_tenant(name: str, arrival_s: Sequence[float], prompt: Any, output: Any) -> Workload:
    """A workload of these lengths, without shared prefixes."""
    lengths = np.asarray(prompt, np.int32), np.asarray(output, np.int32)
    return Workload.of_one_tenant(name, np.asarray(arrival_s), *lengths)


# -- servers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """A server on this machine, ready."""

    port: int
    pid: int

    @property
    def completions(self) -> Target:
        # Here, because a machine with a GPU and the kernels' packages alone may lack those of the client.
        from paceline.lab.bench.load.pool import Target
        from paceline.lab.bench.load.prompt_source import COMPLETIONS, PATHS

        return Target(host=HOST, port=self.port, path=PATHS[COMPLETIONS])

    def call(self, path: str, body: object = None) -> tuple[int, bytes]:
        return call(self.port, path, body)

    def read(self, path: str) -> Any:
        """The JSON that a GET gives."""
        return json.loads(self.call(path)[1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def program(*command: object, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """This command, ended with the block. `options` are those of Popen."""
    process = subprocess.Popen(list(map(str, command)), **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def served(
    options: Sequence[str], output: Path | None = None, **environ: str
) -> contextlib.AbstractContextManager[Server]:
    """`paceline serve`, which ends with the block. `output` gets its card and its log."""
    command = (*PYTHON, "paceline", "serve", *options)
    return served_by(lambda port: [*command, "--port", port], "/health/ready", output, **environ)


@contextlib.contextmanager
def served_by(
    command: Callable[[int], Sequence[object]], ready: str, output: Path | None = None, **environ: str
) -> Iterator[Server]:
    """A server that answers on the path `ready` once it is, and ends with the block."""
    port = free_port()
    with (
        open(output or os.devnull, "wb") as sink,
        program(*command(port), stdout=sink, stderr=sink, env={**os.environ, **environ}) as process,
    ):
        until_s = time.monotonic() + START_S
        while call(port, ready, timeout_s=2.0)[0] != 200:
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the server did not start: {' '.join(map(str, command(port)))}")
            time.sleep(0.1)
        yield Server(port, process.pid)


def children(pid: int) -> list[int]:
    """What a process has started: of a server, the process of its engine."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def call(port: int, path: str, body: object = None, *, timeout_s: float = 600.0) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST where there is a body; status 0: no answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer under way."""

    status: int
    headers: Mapping[str, str]
    events: AsyncIterator[bytes]  # what follows `data: ` in its lines


def request_bytes(path: str, body: object = None, host: str = HOST) -> bytes:
    """A GET, or a POST where there is a body."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload


@contextlib.asynccontextmanager
async def streamed(port: int, path: str, body: object, host: str = HOST) -> AsyncIterator[Answer]:
    """POST over a plain socket: the client must cost little beside the server."""
    reader, writer = await asyncio.open_connection(host, port)

    async def events() -> AsyncIterator[bytes]:
        async for line in reader:
            if line.startswith(b"data: {"):
                yield line[6:]

    try:
        writer.write(request_bytes(path, body, host))
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        yield Answer(int(first.split()[1]), headers, events())
    finally:
        writer.close()


async def open_loop(
    requests: Iterable[tuple[float, Callable[[], Coroutine[Any, Any, None]]]], most: int
) -> set[asyncio.Task[None]]:
    """Send each request at its time, whether or not earlier ones are answered, as long as fewer than `most` are under
    way; returns those that still are at the end."""
    tasks: set[asyncio.Task[None]] = set()
    origin_s = time.perf_counter()
    for due_s, send in requests:
        await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - origin_s)))
        if len(tasks) < most:
            task = asyncio.create_task(send())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    return tasks


def write_keys(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """A keys file in which the key of each name is `sk-` and the name."""
    lines = [
        json.dumps({"name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(), **fields})
        for name, fields in entries.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
