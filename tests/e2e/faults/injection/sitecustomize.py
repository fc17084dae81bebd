"""Faults inside a server under test: the interpreter loads this module automatically in both of its processes.

The tests put this folder on PYTHONPATH. PACELINE_TEST_HOOKS names functions (`module:Class.method`), which are wrapped
when their module is imported; the file of a hook's name in the folder PACELINE_TEST_FAULTS says what its next calls do
(see `live.LiveServer.fault`). Without that file a call costs one look for it. The program itself has no such switch.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

FOLDER = os.environ.get("PACELINE_TEST_FAULTS", "")
HOOKS: dict[str, str] = json.loads(os.environ.get("PACELINE_TEST_HOOKS", "{}"))
Call = Callable[[], Any]


def wrapped(name: str, function: Any) -> Any:
    """The function with its fault, if there is one at the time of a call."""
    path = os.path.join(FOLDER, name)
    seen: list[Any] = ["", 0]  # the order, and calls since it was given

    @functools.wraps(function)
    def faulty(*arguments: Any, **named: Any) -> Any:
        def call() -> Any:
            return function(*arguments, **named)

        try:
            with open(path) as file:
                order = file.read()
        except FileNotFoundError:
            return call()
        if order != seen[0]:
            seen[:] = order, 0
        seen[1] += 1
        _, first, last, kind, *rest = order.split()
        if not int(first) <= seen[1] <= int(last):
            return call()
        with open(path + ".struck", "a") as file:
            file.write(f"{os.getpid()}\n")
        return KINDS[kind](call, arguments, rest)

    return faulty


# -- what a fault does -------------------------------------------------------------------------------------


def fail(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    raise RuntimeError("injected: a secret of the inside")


def out_of_memory(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    raise MemoryError


class OutOfMemoryError(RuntimeError):
    """Named as torch's: the engine knows it by its name."""


def device_out_of_memory(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    raise OutOfMemoryError("injected")


def wait(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    time.sleep(float(rest[0]))
    return call()


def leave(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    os._exit(3)


def segfault(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def collect(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    gc.collect()
    return call()


def not_finite(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    """NaN in the first row of a matrix, or in all of them."""
    result = call()
    result[0 if rest[0] == "first" else slice(None)] = float("nan")
    return result


def wrong_token(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    """Another token than the sampler drew for the first row."""
    from dataclasses import replace

    result = call()
    tokens = result.tokens.astype("int64")
    tokens[0] = int(rest[0])
    return replace(result, tokens=tokens)


def break_guide(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    """A grammar finds that it cannot go on."""
    arguments[0].error = rest[0]
    return call()


def forget_prefixes(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    """Clear the prefix cache before a turn of the engine's service."""
    for model in arguments[0]._models:
        model.engine.scheduler.state.kv.reset_cache()
    return call()


def same_hash(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    """All hashes that are made during the call are equal."""
    module: Any = sys.modules["paceline.kv.prefix"]
    real = module.hashlib
    module.hashlib = SimpleNamespace(blake2b=lambda *a, **k: SimpleNamespace(digest=lambda: bytes(32)))
    try:
        return call()
    finally:
        module.hashlib = real


def junk(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    """Frames that make no sense, on their way to the engine before a good one; six of them are to be counted."""
    from paceline.process import frames
    from paceline.process.channel import make_header

    link = arguments[0]
    sampling = frames.Sampling(max_tokens=3)
    odd = [b"\xff", b"", frames.encode(frames.Update(1.0))]
    odd += [frames.encode(frames.Abort((1, 10**9))), frames.encode(frames.FinishAt(10**9, 5))]
    odd += [frames.encode(frames.Add(1, b"\1\0\0\0", sampling, "a", 0, 0.0, None))]  # a number used before
    for payload in odd:
        link._transport.write(make_header(payload, link._incarnation) + payload)
    large = bytes(5 << 20)
    link._transport.write(make_header(large, link._incarnation) + large)
    for header in (make_header(b"x", link._incarnation + 1), make_header(b"x", link._incarnation, client=3)):
        link._transport.write(header + b"x")
    return call()


def babble(call: Call, arguments: Sequence[Any], rest: Sequence[str]) -> Any:
    """Frames that make no sense, from the engine, before what it has to say: two are to be counted by the client."""
    from paceline.core.events import Finished
    from paceline.core.request import FinishReason, RequestId
    from paceline.process import frames

    service = arguments[0]
    ending = Finished(RequestId(10**9), FinishReason.STOP, "", 1.0, 1, 1, 0, 0)  # of no request, and twice
    odd = frames.Update(1.0, (10**9).to_bytes(8, "little"), bytes(4), [], [ending, ending])
    for payload in (b"\xff", frames.encode(frames.Ping()), frames.encode(odd)):
        while not service._channel.is_free:
            service._channel.wait(0.1)
        service._channel.send(payload)
    return call()


KINDS: dict[str, Callable[[Call, Sequence[Any], Sequence[str]], Any]] = {
    "raise": fail,
    "memory": out_of_memory,
    "device_memory": device_out_of_memory,
    "wait": wait,
    "exit": leave,
    "segv": segfault,
    "collect": collect,
    "nan": not_finite,
    "token": wrong_token,
    "broken": break_guide,
    "forget": forget_prefixes,
    "same_hash": same_hash,
    "junk": junk,
    "babble": babble,
}


# -- getting into the program ------------------------------------------------------------------------------


class Finder(importlib.abc.MetaPathFinder):
    """Lets the modules of the hooks be found as always, and wraps their functions once they are executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hooks = {hook: place for hook, place in HOOKS.items() if place.partition(":")[0] == name}
        spec = importlib.machinery.PathFinder.find_spec(name, path) if hooks else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for hook, place in hooks.items():
                owner: Any = module
                *way, last = place.partition(":")[2].split(".")
                for part in way:
                    owner = getattr(owner, part)
                setattr(owner, last, wrapped(hook, getattr(owner, last)))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def jumping(real: Callable[[], float]) -> Callable[[], float]:
    """The wall clock, off by what the file `clock` says."""

    def now() -> float:
        with suppress(OSError, ValueError), open(os.path.join(FOLDER, "clock")) as file:
            return real() + float(file.read())
        return real()

    return now


if FOLDER:
    sys.meta_path.insert(0, Finder())
    if os.environ.get("PACELINE_TEST_CLOCK"):
        time.time = jumping(time.time)
    if os.environ.get("PACELINE_TEST_GC") == "off":
        gc.disable()
