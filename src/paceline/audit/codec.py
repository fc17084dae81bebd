"""How each value stands in the run log, in both directions.

Inputs, plans, results and decisions become plain JSON values with a fixed order of keys; what is empty is
left out. Token ids and sampling parameters have no place here: a join keeps its sizes, a result its counts.
Results grow with the batch, so their columns are packed into runs. Knows nothing of files and lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.encoder import EncoderWork
from paceline.config.engine import (
    EngineConfig,
    GroupSpec,
    KVConfig,
    LearnedSteps,
    PreemptionCosts,
    SchedulerConfig,
    StepCosts,
)
from paceline.config.speculative import MOST_DRAFTS, DraftConfig
from paceline.core.dial import DialKind
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.inputs import INPUT_TYPES, AddRequest, Extend, Input
from paceline.core.plan import (
    DRAFT_KINDS,
    EMPTY,
    NO_TRUST,
    RUNNING_ON,
    BlockAppends,
    BlockCopies,
    DraftTally,
    GuideWork,
    Moves,
    Placements,
    RowCopies,
    RowDrops,
    RowJoins,
    RowSpans,
    RowVector,
    StepPlan,
    StepResult,
    StepTimes,
    StepWork,
    Swaps,
    i32,
)
from paceline.core.request import BlockReason, RequestId

I32 = NDArray[np.int32]
Json = Any  # what `json` makes: dict, list, str, int, float, bool, None
MAX_COLUMN = 1 << 22  # entries a packed column may have; more is a broken file

NEVER_SHORTER = 6  # values of a decision: kind, request, reason, value, step, time
_DECISION_DEFAULTS = [Decision._field_defaults.get(name) for name in Decision._fields]
NEVER_LOGGED = frozenset({"tokens", "sampling", "texts", "contents", "uses_left"})
# No rows: every column is empty.
_ALIGNED = (
    RowJoins,
    RowSpans,
    BlockAppends,
    BlockCopies,
    RowCopies,
    Swaps,
    Moves,
    Placements,
    RowDrops,
)
_FEW = 24  # entries that are looked at faster one by one
_ZERO_IF_ABSENT = frozenset({"pad", "model", "adapter", "group"})  # columns left out when all zero
_RUN = re.compile(r"(-?\d{1,10})(?:(\.\.|x)(-?\d{1,10}))?", flags=re.ASCII)


class Generations:
    """The generation each row was last joined with: results mention it only where it is another."""

    def __init__(self) -> None:
        self._of_row: I32 = np.zeros(64, np.int32)

    def join(self, rows: I32, generations: I32) -> None:
        if len(rows):
            self._reach(int(rows.max()))
            self._of_row[rows] = generations

    def of(self, rows: I32) -> I32:
        if len(rows):
            self._reach(int(rows.max()))
        known: I32 = self._of_row[rows]
        return known

    def _reach(self, row: int) -> None:
        if row >= MAX_COLUMN:
            raise ValueError(f"row {row} is out of range")
        if row >= len(self._of_row):
            grown = np.zeros(2 * (row + 1), np.int32)
            grown[: len(self._of_row)] = self._of_row
            self._of_row = grown


# -- any value ---------------------------------------------------------------------------------------------


def plain(value: object) -> Json:
    """A value as JSON holds it: bytes as hex, dataclasses by field, numbers that JSON lacks as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return {spec.name: plain(getattr(value, spec.name)) for spec in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(part) for part in value)
    if isinstance(value, Sequence):
        return [plain(part) for part in value]
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a run log cannot hold a {type(value).__name__}")


def config_of(value: Json) -> EngineConfig:
    """The engine config a header holds. An option it lacks has its default; one that is not known raises."""
    kv = {"eviction": "lru", **value["kv"]}  # as it was before there was a choice
    kv["groups"] = tuple(GroupSpec(**group) for group in kv["groups"])
    scheduler = dict(value["scheduler"])
    if scheduler.get("step_costs") is not None:
        costs = dict(scheduler["step_costs"])
        lists = {name: tuple(costs[name]) for name in ("sizes", "seconds")}
        scheduler["step_costs"] = StepCosts(**{**costs, **lists})
    if scheduler.get("learned_steps") is not None:
        scheduler["learned_steps"] = LearnedSteps(**scheduler["learned_steps"])
    if scheduler.get("drafts") is not None:
        drafts = dict(scheduler["drafts"])
        lists = {name: tuple(drafts.get(name, ())) for name in ("sizes", "seconds")}
        scheduler["drafts"] = DraftConfig(**{**drafts, **lists})
    scheduler["pools"] = tuple(scheduler.get("pools", ()))
    if scheduler.get("encoder") is not None:
        scheduler["encoder"] = EncoderWork(**scheduler["encoder"])
    if scheduler.get("preemption_costs") is not None:
        costs = {name: float(value) for name, value in scheduler["preemption_costs"].items()}
        scheduler["preemption_costs"] = PreemptionCosts(**costs)
    parts = {"kv": KVConfig(**kv), "scheduler": SchedulerConfig(**scheduler)}
    return EngineConfig(**{**value, **parts})


# -- inputs and decisions ----------------------------------------------------------------------------------


def encode_input(time_s: float, given: Input) -> list[Json]:
    """An input: its kind, its time, its values. Those of an add stand by name, without defaults; an extension has
    what it places only where it places something."""
    declared: Any = type(given)
    values = {name: plain(getattr(given, name)) for name in _names(declared)}
    if isinstance(given, Extend) and not given.stretches:
        del values["stretches"], values["modules"]
    if not isinstance(given, AddRequest):
        return [given.kind, plain(time_s), *values.values()]
    if given.num_tokens == given.num_prompt:
        del values["num_tokens"]
    named = {name: value for name, value in values.items() if value != _ADD_DEFAULTS[name]}
    return [given.kind, plain(time_s), named]


def decode_input(entry: Json) -> tuple[float, Input]:
    """What `encode_input` was given."""
    kind, time_s, *values = entry
    made: Any = INPUT_TYPES.get(kind)
    if made is None:
        raise ValueError("this version knows no such input")
    if made is AddRequest:
        return decode_time(time_s), decode_add(*values)
    names = _names(made)
    if made is Extend and len(values) == len(names) - 2:
        values += [(), ()]
    named = dict(zip(names, values, strict=True))
    return decode_time(time_s), made(**{name: _decoded(name, value) for name, value in named.items()})


def decode_add(value: Json) -> AddRequest:
    given = {"num_tokens": value["num_prompt"], **value}
    return AddRequest(**{name: _decoded(name, each) for name, each in given.items()})


def _decoded(name: str, value: Json) -> Any:
    decode = _DECODERS.get(name)
    return value if decode is None or value is None else decode(value)


def decode_time(value: Json) -> float:
    """A time; the ones JSON has no number for stand as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a time")
    return float(value) if isinstance(value, str) else value


# Fields of inputs that JSON holds in another form.
_DECODERS: dict[str, Callable[[Json], object]] = {
    "arrival_s": decode_time,
    "deadline_s": decode_time,
    "keys": lambda keys: tuple(bytes.fromhex(key) for key in keys),
    "wishes": tuple,
    "tree": tuple,
    "kv_keep": tuple,
    "pin": tuple,
    "pooling": lambda pooled: (pooled[0], tuple(pooled[1])),
    "media": lambda items: tuple((bytes.fromhex(key), units, outputs) for key, units, outputs in items),
    "stretches": lambda stretches: tuple(map(tuple, stretches)),
    "modules": lambda modules: tuple(
        (tuple(map(bytes.fromhex, keys)), count, again, None if pin is None else tuple(pin))
        for keys, count, again, pin in modules
    ),
    "options": lambda pairs: tuple((name, value) for name, value in pairs),
    "target": DialKind,
    "reason": BlockReason,
    "blocks": tuple,
    "places": tuple,
    "uses": tuple,
    "learned": lambda tables: tuple(map(tuple, tables)),
}
_ADD_DEFAULTS = {
    spec.name: None if spec.default is MISSING else plain(spec.default) for spec in fields(AddRequest)
}


def encode_decision(decision: Decision) -> list[Json]:
    """The fields of a decision in their order; defaults at the end are left out."""
    kind, request, reason, value, step, time_s, *figures = decision
    encoded = [kind.value, int(request), reason.value, int(value), step, plain(time_s), *map(plain, figures)]
    while len(encoded) > NEVER_SHORTER and encoded[-1] == _DECISION_DEFAULTS[len(encoded) - 1]:
        encoded.pop()
    return encoded


def decode_decision(value: Json) -> Decision:
    """What `encode_decision` was given."""
    kind, request, reason, *rest = value
    decision = Decision(DecisionKind(kind), RequestId(request), Rule(reason), *rest)
    return decision._replace(time_s=decode_time(decision.time_s), seconds=decode_time(decision.seconds))


# -- plans -------------------------------------------------------------------------------------------------


def encode_plan(plan: StepPlan) -> dict[str, Json]:
    """The fields of a plan that are not empty, without tokens, without sampling and without its number."""
    return {name: value for name, value in _encode_part(plan).items() if name != "seq"}


def decode_work(plan: Json) -> StepWork:
    """How much a logged plan computes."""
    return StepWork(**{name: int(value) for name, value in plan.get("work", {}).items()})


def _encode_part(part: object) -> dict[str, Json]:
    encoded: dict[str, Json] = {}
    kind: Any = type(part)
    names = _names(kind)
    if kind in _ALIGNED and not len(getattr(part, names[0])):
        return encoded
    for name in names:
        value = getattr(part, name)
        if isinstance(value, int | float):  # a number or a flag
            if value:
                encoded[name] = plain(value)
        elif isinstance(value, np.ndarray):
            if len(value) and not (name in _ZERO_IF_ABSENT and not value.any()):
                encoded[name] = value.tolist()
        elif type(value) is tuple:
            if value:
                encoded[name] = plain(value)
        elif inner := _encode_part(value):
            encoded[name] = inner
    return encoded


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    names = getattr(kind, "_fields", None) or [spec.name for spec in fields(kind)]
    return tuple(name for name in names if name not in NEVER_LOGGED)


# -- results -----------------------------------------------------------------------------------------------


def encode_result(result: StepResult, generations: Generations) -> dict[str, Json]:
    """What came back, without tokens and without what vectors hold."""
    encoded: dict[str, Json] = {"rows": pack(result.rows)}
    if not np.array_equal(generations.of(result.rows), result.generation):
        encoded["generation"] = pack(result.generation)
    encoded["count"] = pack(result.count)
    if np.count_nonzero(result.finished != RUNNING_ON):
        encoded["finished"] = pack(result.finished)
    if not result.finite.all():
        encoded["finite"] = pack(result.finite)
    if len(result.copies_done):
        encoded["copies_done"] = result.copies_done.tolist()
    if len(result.copies_failed):
        encoded["copies_failed"] = result.copies_failed.tolist()
    if result.disk_is_off:
        encoded["disk_is_off"] = True
    if len(result.bad_encodings):
        encoded["bad_encodings"] = result.bad_encodings.tolist()
    if result.vectors:
        encoded["vectors"] = pack(i32(vector.row for vector in result.vectors))
    times = result.times
    if times.start_s or times.end_s:
        encoded["times"] = [plain(times.start_s), plain(times.end_s)]
    if len(result.verified):
        encoded["verified"] = pack(result.verified)
    if len(result.predicted):
        encoded["predicted"] = pack(result.predicted)
    if result.drafts is not None:
        used = 3 if result.drafts.offered.any() else 2
        encoded["drafts"] = [pack(column) for column in result.drafts[:used]]
    if result.guided is not None:
        encoded["certain"] = result.guided.certain
    return encoded


def decode_result(value: Json, seq: int, generations: Generations) -> StepResult:
    """A result to give to the scheduler, with zeros for tokens."""
    rows = unpack(value["rows"])
    num_rows = len(rows)
    start_s, end_s = value.get("times", (0.0, 0.0))
    count, drafts = unpack(value["count"]), value.get("drafts")
    if len(count) and not 0 <= count.min() <= count.max() <= MOST_DRAFTS + 1:
        raise ValueError(f"a row got {count.max()} tokens")
    result = StepResult(
        seq=seq,
        rows=rows,
        generation=_column(value, "generation", generations.of(rows)),
        tokens=np.zeros((num_rows, int(count.max(initial=1))), np.int32),
        count=count,
        finished=_column(value, "finished", np.full(num_rows, RUNNING_ON)).astype(np.uint8),
        finite=_column(value, "finite", np.ones(num_rows)).astype(np.bool_),
        copies_done=np.array(value.get("copies_done", []), np.int32),
        copies_failed=np.array(value.get("copies_failed", []), np.int32),
        disk_is_off=bool(value.get("disk_is_off", False)),
        times=StepTimes(start_s=decode_time(start_s), end_s=decode_time(end_s)),
        verified=_column(value, "verified", EMPTY),
        predicted=_column(value, "predicted", EMPTY),
        drafts=None if drafts is None else DraftTally(*map(unpack, drafts)),
        guided=GuideWork(0, 0.0, certain=int(value["certain"])) if "certain" in value else None,
        bad_encodings=np.array(value.get("bad_encodings", []), np.int32),
        vectors=tuple(RowVector(row, NO_TRUST) for row in _column(value, "vectors", EMPTY).tolist()),
    )
    columns: list[NDArray[Any]] = [result.generation, result.count, result.finished, result.finite]
    columns += [each for each in (result.verified, result.predicted) if len(each)]
    for column in columns:
        if len(column) != num_rows:
            raise ValueError(f"a column has {len(column)} entries for {num_rows} rows")
    if result.drafts is not None and any(len(column) != DRAFT_KINDS for column in result.drafts):
        raise ValueError(f"a tally of drafts does not have {DRAFT_KINDS} kinds")
    return result


def _column(value: Json, name: str, absent: NDArray[Any]) -> NDArray[Any]:
    return unpack(value[name]) if name in value else absent


def pack(column: NDArray[Any]) -> str:
    """Whole numbers as runs: `0..7` counts up, `1x64` repeats 1, anything shorter than three stands alone."""
    count = len(column)
    if not count:
        return ""
    parts: list[str] = []
    start = 0
    for end in [*_turns(column), count - 1]:
        if end - start >= 2:
            first, last = int(column[start]), int(column[end])
            step = last - int(column[end - 1])
            if step in (0, 1):
                parts.append(f"{first}..{last}" if step else f"{first}x{end - start + 1}")
                start = end + 1
                continue
        if end > start:
            parts.extend(map(str, column[start:end].astype(np.int64).tolist()))
            start = end
    if start < count:
        parts.append(str(int(column[start])))
    return ",".join(parts)


def _turns(column: NDArray[Any]) -> list[int]:
    """Where a stretch of equal steps between neighbours ends."""
    if len(column) <= _FEW:
        numbers = column.tolist()
        steps = [later - earlier for earlier, later in pairwise(numbers)]
        return [index for index, (one, two) in enumerate(pairwise(steps), 1) if one != two]
    values = column.astype(np.int64)
    differences = values[1:] - values[:-1]
    turns: list[int] = (np.flatnonzero(differences[1:] != differences[:-1]) + 1).tolist()
    return turns


def unpack(text: str) -> I32:
    """What `pack` was given."""
    values: list[int] = []
    for part in text.split(",") if text else ():
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a run of numbers")
        first, second = int(match[1]), int(match[3] or 0)
        count = {None: 1, "..": second - first + 1, "x": second}[match[2]]
        if not 0 < count <= MAX_COLUMN - len(values):
            raise ValueError(f"{part!r} is not a run of numbers")
        values.extend([first] * count if match[2] != ".." else range(first, second + 1))
    return np.array(values, np.int32)
