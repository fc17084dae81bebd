"""The run log as a file: JSON lines, a header, one line per completed step, an end.

The writer is a `StepRecorder`: it writes as it goes and keeps nothing. The reader streams, so that a log may
be larger than memory, and says which line is broken and how much before it can be used. How single values
stand in a line is the codec's business; what a log is used for is its readers' business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from paceline.audit.codec import (
    Generations,
    Json,
    config_of,
    decode_time,
    encode_decision,
    encode_input,
    encode_plan,
    encode_result,
    plain,
)
from paceline.audit.linefile import Damaged, LineFile, Unfinished, read_lines
from paceline.config.engine import EngineConfig
from paceline.core.events import Decision
from paceline.core.recorder import Inputs, StepRecord
from paceline.errors import ConfigError, InputError
from paceline.version import __version__

VERSION = 2
BEGAN = "began_s"  # in a header, of runs that begin before anything comes in: when, on the run's clock
OLDEST = 1  # of which plans and results can be read; its decisions lack what explains them
BROKEN = (ValueError, KeyError, TypeError, IndexError, RecursionError)


class CutLog(InputError):
    """A log is broken or cut off somewhere; what comes before that can be used."""

    def __init__(self, message: str, *, is_at_end: bool) -> None:
        super().__init__(message)
        self.is_at_end = is_at_end  # the file ends there: it is still written, or its writer was killed


def run_header(config: EngineConfig, **more: object) -> dict[str, object]:
    """What a log's header should say: the whole config, the program's version, and anything else (a seed)."""
    return {"version": __version__, "config": plain(config), **more}


# -- writing -----------------------------------------------------------------------------------------------


class LineEncoder:
    """Makes the lines of one log. Steps must come in order: a result leaves out what the joins have said."""

    def __init__(self) -> None:
        self._generations = Generations()

    def header(self, header: Mapping[str, object]) -> str:
        given = {"version": __version__, **header}
        rest = {name: plain(given[name]) for name in sorted(given) if name not in ("v", "kind")}
        return _line({"kind": "header", **rest})

    def step(self, record: StepRecord) -> str:
        joins = record.plan.joins
        self._generations.join(joins.row, joins.generation)
        result = record.result
        return _line(
            {
                "seq": record.plan.seq,
                "t_plan": plain(record.t_plan),
                "t_done": plain(record.t_done),
                "inputs": [encode_input(*entry) for entry in record.inputs],
                "plan": encode_plan(record.plan),
                "result": None if result is None else encode_result(result, self._generations),
                "decisions": [encode_decision(decision) for decision in record.decisions],
            }
        )

    def end(self, inputs: Inputs, decisions: Sequence[Decision]) -> str:
        return _line(
            {
                "kind": "end",
                "inputs": [encode_input(*entry) for entry in inputs],
                "decisions": [encode_decision(each) for each in decisions],
            }
        )


class RunLogWriter:
    """Writes a log line by line. `header` goes into the first line; see `run_header`."""

    def __init__(self, target: str | Path | TextIO, header: Mapping[str, object]) -> None:
        self._encoder = LineEncoder()
        self._file: LineFile | None = LineFile(target)
        self._file.write(self._encoder.header(header))

    def step(self, record: StepRecord) -> None:
        assert self._file is not None, "the log is closed"
        self._file.write(self._encoder.step(record))

    def close(self, inputs: Inputs = (), decisions: Sequence[Decision] = ()) -> None:
        """Write the end line and close the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.write(self._encoder.end(inputs, decisions))
            file.close()


# -- reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLine:
    """What a line holds, as JSON has it; the codec reads the values. The last line holds no more."""

    line: int  # in the file, from 1
    text: str
    inputs: list[Json]
    decisions: list[Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep(LoggedLine):
    """One step's line."""

    seq: int
    t_plan: float
    t_done: float
    plan: dict[str, Json]
    result: dict[str, Json] | None  # None: the step failed


class RunLog:
    """A log on disk. Iterate to read its steps; each iteration reads the file anew.

    After an iteration that went through, `end` is the last line, or None when the run was not closed.
    """

    def __init__(self, path: Path, *, allow_cut: bool) -> None:
        self.path = path
        self.end: LoggedLine | None = None
        self.damage: CutLog | None = None  # with `allow_cut`: why the last iteration stopped early
        self._allow_cut = allow_cut
        self.header = self._read_header()
        self.version: int = self.header["v"]

    @property
    def config(self) -> EngineConfig:
        """The config of the engine that was recorded."""
        if "config" not in self.header:
            raise InputError(f"{self.path}: the header holds no engine config")
        try:
            return config_of(self.header["config"])
        except ConfigError as problem:
            raise InputError(f"{self.path}: the config in the header is not valid: {problem}") from problem
        except BROKEN as problem:
            raise InputError(
                f"{self.path}: the config in the header is not one this version knows: {problem}"
            ) from problem

    @property
    def is_unfinished(self) -> bool:
        """After an iteration: nothing is broken and the end is missing, as while a server still writes the log."""
        return self.end is None and (self.damage is None or self.damage.is_at_end)

    def __iter__(self) -> Iterator[LoggedStep]:
        self.end, self.damage = None, None
        try:
            yield from self._steps()
        except CutLog as problem:
            if not self._allow_cut:
                raise
            self.damage = problem

    def lines(self) -> Iterator[LoggedLine]:
        """The steps, and the last line of a run that was closed."""
        yield from self
        if self.end is not None:
            yield self.end

    def _steps(self) -> Iterator[LoggedStep]:
        num_steps, last_seq = 0, None
        lines = enumerate(read_lines(self.path), 1)
        next(lines, None)  # the header
        while True:
            number = num_steps + (3 if self.end is not None else 2)
            try:
                numbered = next(lines, None)
            except Damaged as problem:
                at_end = isinstance(problem, Unfinished)
                raise self._damaged(number, "cannot be read", num_steps, is_at_end=at_end) from problem
            if numbered is None:
                return
            read = self._checked(*numbered, num_steps, last_seq)
            if isinstance(read, LoggedStep):
                num_steps, last_seq = num_steps + 1, read.seq
                yield read
            else:
                self.end = read

    def _checked(self, number: int, text: str, num_steps: int, last_seq: int | None) -> LoggedLine:
        try:
            read = _read_line(number, text, self.version)
            if self.end is not None:
                raise ValueError("it stands after the end of the run")
            if isinstance(read, LoggedStep) and last_seq is not None and read.seq != last_seq + 1:
                raise ValueError(f"step {read.seq} follows step {last_seq}")
        except BROKEN as problem:
            is_whole = text.endswith("\n")
            what = f"is broken: {reason(problem)}" if is_whole else "is cut off"
            raise self._damaged(number, what, num_steps, is_at_end=not is_whole) from problem
        return read

    def _damaged(self, number: int, what: str, num_steps: int, *, is_at_end: bool) -> CutLog:
        steps = f"{num_steps} step{'' if num_steps == 1 else 's'}"
        message = f"{self.path}: line {number} {what}; the {steps} before it can be used"
        return CutLog(message, is_at_end=is_at_end)

    def _read_header(self) -> dict[str, Json]:
        not_one = f"{self.path} is not a Paceline run log"
        try:
            first = next(read_lines(self.path), None)
        except Damaged as problem:
            raise InputError(f"{not_one}: its first line cannot be read") from problem
        if first is None:
            raise InputError(f"{not_one}: it is empty")
        try:
            header = json.loads(first)
            version = header["v"]
            is_header = header["kind"] == "header" and type(version) is int and version >= OLDEST
        except BROKEN:
            is_header = False
        if not is_header:
            raise InputError(f"{not_one}: its first line is not a header")
        if version > VERSION:
            raise InputError(
                f"{self.path} is a run log of version {version}; this program reads version {VERSION}: "
                "use a newer Paceline"
            )
        return cast(dict[str, Json], header)

    def check_decisions(self) -> None:
        """Raise unless the log says why: one of an older version can serve a cost model, no replay and no story."""
        if self.version < VERSION:
            raise InputError(
                f"{self.path} is a run log of version {self.version}, whose decisions do not say what explains "
                f"them: record the run again (this program writes version {VERSION})"
            )


def read_run_log(path: str | Path, *, allow_cut: bool = False) -> RunLog:
    """Open a log; a file that is not one raises here, a broken line when it is reached.

    With `allow_cut` reading stops before a broken line instead, and `RunLog.damage` says why.
    """
    return RunLog(Path(path), allow_cut=allow_cut)


# -- single lines ------------------------------------------------------------------------------------------


def dumps(value: Json) -> str:
    """JSON as the log has it: no spaces, keys in the order given."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _line(fields: dict[str, Json]) -> str:
    return dumps({"v": VERSION, **fields})


def _read_line(number: int, text: str, version: int) -> LoggedLine:
    if not text.endswith("\n"):
        raise ValueError("no end of line")
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if value["v"] != version:
        raise ValueError(f"its version is {value['v']!r}")
    inputs, decisions = _entries(value, "inputs"), _entries(value, "decisions")
    text = text[:-1]
    if value.get("kind") == "end":
        return LoggedLine(line=number, text=text, inputs=inputs, decisions=decisions)
    seq, plan, result = value["seq"], value["plan"], value["result"]
    if type(seq) is not int or not isinstance(plan, dict) or not isinstance(result, dict | None):
        raise ValueError("'seq', 'plan' or 'result' is not what a step has there")
    return LoggedStep(
        line=number,
        text=text,
        seq=seq,
        t_plan=decode_time(value["t_plan"]),
        t_done=decode_time(value["t_done"]),
        inputs=inputs,
        plan=plan,
        result=result,
        decisions=decisions,
    )


def _entries(value: dict[str, Json], name: str) -> list[Json]:
    """A list of lists, each opening with its kind."""
    entries = value[name]
    if not isinstance(entries, list) or not all(
        isinstance(entry, list) and len(entry) > 1 and isinstance(entry[0], str) for entry in entries
    ):
        raise ValueError(f"'{name}' is not a list of entries")
    return entries


def reason(problem: BaseException) -> str:
    """What is wrong with a line, in a few words."""
    if isinstance(problem, KeyError):
        return f"{problem} is missing"
    if isinstance(problem, json.JSONDecodeError):
        return f"not JSON ({problem.msg} at character {problem.pos + 1})"
    return str(problem)
