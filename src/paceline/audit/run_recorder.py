"""The run log of an engine that serves: a separate thread encodes and writes it, one file for each run.

A step pays for one append to a queue. What is written reaches the operating system twice a second, so that a process
that is killed leaves a log that can be replayed up to that moment. A log has a largest size, for half of one cannot be
replayed from its middle: it ends there, and the engine goes on. Logs of earlier runs, those of an engine that died
among them, are kept under numbers. Knows nothing of what a log is good for.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from pathlib import Path

from paceline.audit.linefile import LineFile
from paceline.audit.runlog import LineEncoder, run_header
from paceline.config.engine import EngineConfig
from paceline.core.events import Decision
from paceline.core.recorder import BothRecorders, Inputs, StepRecord, StepRecorder
from paceline.errors import InputError

INTERVAL_S = 0.5
MOST_WAITING = 4096  # steps that are not written yet

_logger = logging.getLogger("paceline")
Last = tuple[Inputs, Sequence[Decision]]  # what came after the last plan


class RunRecorder:
    """A `StepRecorder` for a run whose end is not known. `header` goes into the first line."""

    def __init__(
        self,
        path: str | Path,
        header: Mapping[str, object],
        *,
        max_bytes: int,
        max_files: int,
        interval_s: float = INTERVAL_S,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._path = Path(path)
        self._encoder = LineEncoder()
        first = self._encoder.header(header)
        keep_earlier(self._path, max_files)
        self._file = LineFile(path)
        self._file.write(first)
        self._file.flush()
        self._max_bytes, self._most, self._interval_s = max_bytes, most_waiting, interval_s
        self._waiting: deque[StepRecord] = deque()
        self._last: Last | None = None
        self._stopped = ""  # why the log goes no further
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-run-log", daemon=True)
        self._thread.start()
        # For owners that never close their engine: writes what there is, without a last line.
        atexit.register(self._end)

    def step(self, record: StepRecord) -> None:
        if self._stopped:
            return
        if len(self._waiting) >= self._most:  # a gap cannot be replayed, and no step waits for a disk
            self._stop(f"the disk is {self._most:,} steps behind")
            return
        self._waiting.append(record)

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        """Write what is left and the last line. A second call does nothing."""
        if not self._closed.is_set():
            self._last = (inputs, decisions)
            self._end()

    def _end(self) -> None:
        atexit.unregister(self._end)
        self._closed.set()
        self._thread.join()

    def _stop(self, why: str) -> None:
        if not self._stopped:
            self._stopped = why
            _logger.warning("the run log %s ends here: %s", self._path, why)

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._interval_s):
                self._write()
            self._write()
            if self._last is not None and not self._stopped:
                self._file.write(self._encoder.end(*self._last))
            self._file.close()
        except InputError as problem:  # the disk took no more; the message says after which line
            self._stop(str(problem))
        except Exception:
            _logger.exception("the run log could not be written")
            self._stop("it could not be written")
        self._waiting.clear()

    def _write(self) -> None:
        """What waits, and no more: what comes meanwhile has its turn the next time."""
        for _ in range(len(self._waiting)):
            if self._file.problem is not None or self._file.num_bytes >= self._max_bytes:
                break
            self._file.write(self._encoder.step(self._waiting.popleft()))
        self._file.flush()
        if self._file.problem is not None:
            self._stop(f"{self._file.problem.strerror or self._file.problem}")
        elif self._file.num_bytes >= self._max_bytes:
            self._stop(f"it has reached {self._max_bytes:,} bytes (--run-log-bytes)")
        if self._stopped:
            self._waiting.clear()


def open_recorders(
    config: EngineConfig, given: StepRecorder | None, about: Mapping[str, object]
) -> StepRecorder | None:
    """The recorder of steps: the one given, and the decision log and the run log if they are on."""
    recorders = [] if given is None else [given]
    if config.decision_log:
        from paceline.audit.trail import Retention, TrailDb, TrailWriter

        retention = Retention(
            max_bytes=config.decision_log_bytes,
            max_files=config.decision_log_files,
            max_age_s=config.decision_log_days * 86400.0,
        )
        recorders.append(TrailWriter(TrailDb(config.decision_log, retention)))
    if config.run_log:
        sizes = {"max_bytes": config.run_log_bytes, "max_files": config.run_log_files}
        recorders.append(RunRecorder(config.run_log, run_header(config, **about), **sizes))
    return reduce(BothRecorders, recorders) if recorders else None


def check_run_log(path: str) -> None:
    """Raise InputError if no log can be written there: better before a model is loaded than after."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InputError(f"the run log {path} cannot be written: there is no folder {folder}; make it first")
    if Path(path).is_dir():
        raise InputError(f"the run log {path} cannot be written: it is a folder; name a file in it")


def keep_earlier(path: Path, most: int) -> None:
    """Logs of earlier runs get the next number, `run.jsonl.1` being the newest; beyond `most` they go."""
    try:
        if not path.exists():
            return
        names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, most + 1))]
        for older, newer in pairwise(reversed(names)):
            if newer.exists():
                newer.replace(older)
    except OSError as error:
        raise InputError(f"the run log {path} cannot be written: {error.strerror or error}") from error
