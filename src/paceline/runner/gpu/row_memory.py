"""All columns of all rows in one memory on the device, with a copy on the host that changes are made in first.

A change is an address and a word; the changes of a plan go over in one copy and are written by one kernel. Words the
device owns once a row runs (its length, whether it is active, tokens drawn) are written here only when a row joins.
The last row is a dummy: unused slots of a batch point to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import EngineConfig
from paceline.config.sized import Capacity
from paceline.config.speculative import ORACLE, DraftConfig
from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.draft_layout import NUM_LIMITS
from paceline.runner.gpu.kernels.draft_predictions import STATE_WORDS
from paceline.runner.gpu.kernels.prefill_attention import Spans
from paceline.runner.gpu.kernels.shared_attention import MAX_GROUPS, SharedGroups
from paceline.runner.gpu.kernels.step_rows import MAX_STOP_IDS, RowColumns, write_words

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
NO_PLACE = 0  # of the adapter of a row that has none; others begin behind it
_ROOM = 1 << 19  # changes there is room for at once; more are made room for, which takes a while
_PREDICTIONS = 64  # rows that can have one at a time
# Kernels count its words in 32 bits; some are for columns that all rows share.
MOST_ROW_BYTES = 4 * (2**31 - 2**26)
_ALIGNED = 64  # words: kernels are compiled for columns that begin at multiples of 16 bytes


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """One column: where it lies, and how many words an entry has."""

    start: int
    width: int
    host: I32  # [entries, width]
    device: Tensor  # the same


class RowMemory:
    """Sections by name; `put` changes, `send` writes the changes to the device."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        capacity = Capacity.of(config)
        self.num_rows = self.dummy_row = capacity.num_rows
        self.max_slots = config.scheduler.max_num_seqs
        self.depth = config.depth  # steps that may be under way beside the one that is planned
        self.num_groups = len(config.kv.groups)
        rows, slots = self.num_rows + 1, self.max_slots + self.num_rows
        tables = {f"table{group}": (rows, capacity.max_blocks_per_row) for group in range(self.num_groups)}
        shapes = {
            "temperature": (rows, 2),
            "seed": (rows, 2),
            "length": (rows, 1),
            "max_length": (rows, 1),
            "active": (rows, 1),
            "dropped": (rows, 1),
            "stop_ids": (rows, MAX_STOP_IDS),
            "top_k": (rows, 1),
            "top_p": (rows, 2),
            "min_p": (rows, 2),
            "place": (rows, 1),
            "num_prompt": (rows, 1),
            "logprobs": (rows, 1),
            "adapter": (rows, 1),
            "slot_rows": (self.max_slots, 1),
            "shared": (rows, 1),
            "shared_row": (MAX_GROUPS, 1),
            "shared_first": (MAX_GROUPS, 1),
            "shared_count": (MAX_GROUPS, 1),
            "shared_length": (MAX_GROUPS, 1),
            "span_row": (rows, 1),
            "span_first": (rows, 1),
            "span_count": (rows, 1),
            "span_position": (rows, 1),
            "sample_rows": (slots, 1),
            "sample_tokens": (slots, 1),
            **tables,
            "tokens": (rows, config.scheduler.max_model_len + 1),
        }
        if config.scheduler.encoder is not None:
            # By how much less than its position a token behind all pictures turns.
            shapes["turned"] = (rows, 1)
        if config.scheduler.drafts is not None:
            shapes |= _draft_shapes(config.scheduler.drafts, shapes["tokens"])
        starts, size = {}, 0
        for name, (entries, width) in shapes.items():
            starts[name] = size
            size += -(-entries * width // _ALIGNED) * _ALIGNED
        assert size < 2**31, "sizes are chosen so that a 32-bit address reaches every word of the rows"
        self._host: I32 = np.zeros(size, np.int32)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sections = {name: self._section(starts[name], *shape) for name, shape in shapes.items()}
        self._changed: list[I64] = []
        # A plan is sent in up to three parts, and those of the steps under way may not have been read yet.
        self._staging: list[Tensor] = [_pinned(_ROOM) for _ in range(3 * (config.depth + 1) + 1)]
        self._arrived = torch.empty(2, _ROOM, dtype=torch.int32, device=device)
        self._turn = 0
        self._sections["slot_rows"].host[:] = self.dummy_row
        self._sections["slot_rows"].device.fill_(self.dummy_row)
        self.columns = RowColumns(
            length=self.column("length"),
            max_length=self.column("max_length"),
            active=self.column("active"),
            dropped=self.column("dropped"),
            stop_ids=self["stop_ids"].device,
            tokens=self["tokens"].device,
        )
        self._sections["place"].device.fill_(-1)  # no row has rules
        self.tables = [self[name].device for name in tables]

    def __getitem__(self, name: str) -> Section:
        return self._sections[name]

    def column(self, name: str) -> Tensor:
        """A section of one word per entry, flat."""
        return self._sections[name].device.view(-1)

    def spans(self, count: int) -> Spans:
        """The first spans of a step."""
        names = ("row", "first", "count", "position")
        return Spans(**{name: self.column(f"span_{name}")[:count] for name in names})

    def shared_groups(self) -> SharedGroups:
        names = ("row", "first", "count", "length")
        return SharedGroups(**{name: self.column(f"shared_{name}") for name in names})

    def put(self, name: str, at: I64 | slice, values: object) -> None:
        """Entries `at` become `values`: a word each, or a row of words."""
        section = self._sections[name]
        if isinstance(at, slice):
            at = np.arange(at.start, at.stop)
        words = np.asarray(values, np.int32)
        if words.ndim < 2:
            words = words.reshape(-1, 1)
        columns = np.arange(words.shape[1])
        section.host[at[:, None], columns] = words
        self._changed.append((section.start + at[:, None] * section.width + columns).ravel())

    def put_wide(self, name: str, at: I64, values: NDArray[np.float64] | NDArray[np.int64]) -> None:
        """The same for entries of 64 bits."""
        self.put(name, at, values.view(np.int32).reshape(-1, 2))

    def put_tokens(self, row: int, tokens: I32, name: str = "tokens", first: int = 0) -> None:
        """Tokens of a row, from position `first` on."""
        section = self._sections[name]
        section.host[row, first : first + len(tokens)] = tokens
        start = section.start + row * section.width + first
        self._changed.append(np.arange(start, start + len(tokens)))

    def touch(self, addresses: I64) -> None:
        """Words that were changed in a section's copy on the host."""
        self._changed.append(addresses)

    def forget_changes(self) -> None:
        self._changed.clear()

    def send(self) -> None:
        """Write all changes since the last time, in the stream that is current."""
        if not self._changed:
            return
        addresses = self._changed[0] if len(self._changed) == 1 else np.concatenate(self._changed)
        self._changed.clear()
        count = len(addresses)
        self._turn = (self._turn + 1) % len(self._staging)
        if self._staging[self._turn].shape[1] < count:
            self._staging[self._turn] = _pinned(2 * count)
        if self._arrived.shape[1] < count:
            self._arrived = torch.empty(2, 2 * count, dtype=torch.int32, device=self._device.device)
        staging = self._staging[self._turn]
        words = staging.numpy()
        words[0, :count] = addresses
        words[1, :count] = self._host[addresses]  # the last of several changes, whichever is written last
        for part in (0, 1):
            self._arrived[part, :count].copy_(staging[part, :count], non_blocking=True)
        write_words(self._device, self._arrived, count)

    def _section(self, start: int, entries: int, width: int) -> Section:
        end = start + entries * width
        return Section(
            start,
            width,
            self._host[start:end].reshape(entries, width),
            self._device[start:end].view(entries, width),
        )

    def wide(self, name: str, dtype: torch.dtype) -> Tensor:
        """A section of 64 bits per entry, flat."""
        return self._sections[name].device.view(-1).view(dtype)


def row_bytes(longest: int) -> int:
    """What a row of up to `longest` tokens takes on the device, about: its tokens, its blocks and its other columns. On
    the host it is the same, of which only what was written takes memory."""
    return 4 * (longest + longest // BLOCK_SIZE + 2 * _ALIGNED)


def _pinned(count: int) -> Tensor:
    return torch.empty(2, count, dtype=torch.int32, pin_memory=torch.cuda.is_available())


def _draft_shapes(drafts: DraftConfig, tokens: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Entries and width of the columns that drafts need."""
    rows = tokens[0]
    shapes = {
        "may_draft": (rows, 1),
        "draft_fate": (rows, 1),
        "draft_limits": (NUM_LIMITS, 1),
        # Tokens that a guide is certain of: those of the step under way, and of the one behind it.
        "certain": (rows, 2 * drafts.width + 1),
        "certain_first": (rows, 1),
        "certain_count": (rows, 1),
    }
    if drafts.model:
        shapes["state_position"] = (rows, 1)
    if drafts.method == "history":
        shapes["texts"] = (rows, 2)
    if drafts.method == ORACLE:
        return shapes | {"answer_end": (rows, 1), "answers": tokens}
    return shapes | {
        "prediction_place": (rows, 1),
        "prediction_count": (rows, 1),
        "prediction_state": (rows, STATE_WORDS),
        "predictions": (min(rows, _PREDICTIONS), tokens[1]),
    }
