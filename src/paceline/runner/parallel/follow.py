"""Where a follower starts: `python -m paceline.runner.parallel.follow`, its end of a socket pair as standard input.

It holds its part of the model and does what the lead says, step by step. It plans nothing and measures nothing by
itself, and it ends when the lead is gone, also from within a sum over ranks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.audit.codec import config_of
from paceline.config.engine import ModelConfig
from paceline.core.guide import Guide, Mask
from paceline.core.plan import Pending, StepResult
from paceline.models.files.open import open_checkpoint
from paceline.runner.cpu import CPURunner
from paceline.runner.parallel.lead import DONE, LATE_S, checksum_of
from paceline.runner.parallel.link import Kind, Link, LinkClosed, watch
from paceline.runner.parallel.wire import decode

LOST = 70
_PR_SET_PDEATHSIG = 1

_logger = logging.getLogger("paceline")


def main() -> None:
    link = Link(_take_socket())
    _prepare_process()
    watch([link], lambda _: os._exit(LOST))
    try:
        kind, payload = link.receive()
        assert kind is Kind.SET_UP, kind
        about = json.loads(bytes(payload))
        _die_with(about["parent"])
        try:
            follower = Follower(link, about)
        except Exception as error:  # the lead says it
            link.send(Kind.FAILED, f"{type(error).__name__}: {error}".encode())
            os._exit(LOST)
        follower.run()
    except (LinkClosed, TimeoutError):
        os._exit(LOST)


class Follower:
    """A rank that does what it is told."""

    def __init__(self, link: Link, about: dict[str, Any]) -> None:
        import torch

        from paceline.runner.parallel.gloo import GlooRanks, rank_decoder
        from paceline.runner.sizing import default_memory

        torch.set_num_threads(about["threads"])
        self._link = link
        self._model = ModelConfig(**about["model"])
        checkpoint = open_checkpoint(about["path"], load_format=self._model.load_format)
        link.send(Kind.DONE)  # from here on it will be found
        together = GlooRanks(Path(about["folder"]), about["rank"], about["size"])
        self._decoder = rank_decoder(checkpoint, about["rank"], together, about["size"])
        self._runner: CPURunner | None = None
        self._pending: dict[int, Pending] = {}
        link.send(Kind.DONE, json.dumps({"memory": default_memory()}).encode())

    def run(self) -> None:
        """Until the lead is gone."""
        timeout_s: float | None = None
        while True:
            kind, payload = self._link.receive(timeout_s)
            try:
                answer = self._obey(kind, payload)
            except LinkClosed:
                raise
            except Exception as error:
                # The lead has failed in the same way and says how it goes on, or waits for us in a sum.
                _logger.exception("a rank has failed in what it was told")
                answer, timeout_s = None, LATE_S
                self._link.send(Kind.FAILED, f"{type(error).__name__}: {error}".encode())
            else:
                timeout_s = None
            if answer is not None:
                self._link.send(Kind.DONE, answer)

    def _obey(self, kind: Kind, payload: memoryview) -> bytes | None:
        """Do what a message says; the answer to it, if it has one."""
        if kind is Kind.OPEN:
            self._open(json.loads(bytes(payload)))
        elif kind is Kind.CLOSE:
            self._close()
        elif kind is Kind.MEASURE:
            from paceline.runner.torch_step import measure_step

            measure_step(self._decoder)
            return b""
        else:
            assert self._runner is not None, kind
            return self._obey_runner(self._runner, kind, payload)
        return None

    def _obey_runner(self, runner: CPURunner, kind: Kind, payload: memoryview) -> bytes | None:
        match kind:
            case Kind.RESET:
                self._pending.clear()
                runner.reset(decode(payload))
            case Kind.SUBMIT:
                plan = decode(payload)
                self._pending[plan.seq] = runner.submit(plan)
            case Kind.RUN:
                (seq, *rows) = struct.unpack(f"<q{(len(payload) - 8) // 4}i", payload)
                pending = self._pending.pop(seq)
                if rows:
                    pending.supply({row: HeardGuide(self._link) for row in rows})
                return _answer(pending.wait())
            case Kind.COPY:
                runner.copy_out_and_back(struct.unpack("<q", payload)[0])
                return b""
            case _:
                raise AssertionError(kind)
        return None

    def _open(self, given: dict[str, Any]) -> None:
        from paceline.runner.torch_step import TorchStep

        config, ends = config_of(given["config"]), given["ends"]
        self._close()  # its KV goes before there is another
        step = TorchStep(self._decoder, config.kv, kv_dtype=self._model.cpu_kv_dtype)
        self._runner = CPURunner(config, step, None if ends is None else tuple(ends))

    def _close(self) -> None:
        self._pending.clear()
        self._runner = None


def _answer(result: StepResult) -> bytes:
    return DONE.pack(result.seq, checksum_of(result)) + result.copies_done.astype(np.int32).tobytes()


class HeardGuide:
    """What the lead's guide says, asked in the same order."""

    error = ""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def is_over(self) -> bool:
        return bool(self._numbers()[0])

    def consume(self, tokens: Sequence[int]) -> None: ...

    def mask(self) -> Mask | None:
        heard = self._hear()
        return np.frombuffer(heard, np.uint32) if len(heard) else None

    def forced(self) -> list[int]:
        return self._numbers()

    def accepts(self, tokens: Sequence[int]) -> int:
        return self._numbers()[0]

    def copy(self) -> Guide:
        return self

    def end_reasoning(self) -> bool:
        raise AssertionError("guides are the lead's")

    def _numbers(self) -> list[int]:
        heard = self._hear()
        return list(struct.unpack(f"<{len(heard) // 8}q", heard))

    def _hear(self) -> memoryview:
        kind, payload = self._link.receive()
        assert kind is Kind.ANSWER, kind
        return payload


def _take_socket() -> socket.socket:
    """Standard input is the socket; nothing else may read from it or hand it on."""
    sock = socket.socket(fileno=os.dup(0))
    os.set_inheritable(sock.fileno(), False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return sock


def _prepare_process() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the lead ends us
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _die_with(parent: int) -> None:
    """End with the lead, even while stopped; `parent` 0: the end of the socket has to do."""
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(LOST)


if __name__ == "__main__":
    main()
