"""The device's side of the row table: tokens, counters and block tables of every row.

Plans change it, in the order a plan prescribes; a step's sampling advances it. It never sees a request: a row is a
number with a generation. On the CPU these are numpy arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import Capacity, EngineConfig
from paceline.core.plan import BlockAppends, BlockCopies, RowCopies, RowJoins, StepPlan

Count = NDArray[np.int64]


class DeviceRows:
    """Columns of all rows, as the runner knows them."""

    def __init__(self, config: EngineConfig) -> None:
        capacity = Capacity.of(config)
        num_rows = capacity.num_rows
        self.tokens: Count = np.zeros((num_rows, config.scheduler.max_model_len + 1), np.int64)
        self.generation: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.num_prompt: Count = np.zeros(num_rows, np.int64)
        self.num_tokens: Count = np.zeros(num_rows, np.int64)
        self.computed: Count = np.zeros(num_rows, np.int64)
        self.limit: Count = np.zeros(num_rows, np.int64)
        self.ended = np.zeros(num_rows, np.bool_)  # has its last token; the host may not know yet
        self.decoding = np.zeros(num_rows, np.bool_)
        self.prompt_logprobs: Count = np.full(num_rows, -2, np.int64)  # -2: not asked for
        self.tables: list[Count] = [
            np.zeros((num_rows, capacity.max_blocks_per_row), np.int64) for _ in config.kv.groups
        ]

    def apply(self, plan: StepPlan) -> None:
        """Leaves, joins, row copies and block appends of a plan."""
        self.decoding[plan.leaves] = False
        if len(plan.joins.row):
            self._join(plan.joins)
            self._copy_rows(plan.row_copies)
        change = plan.decode_rows
        self.decoding[change.removed] = False
        self.decoding[change.added] = True
        self._append(plan.new_blocks)

    def replace_blocks(self, copies: BlockCopies) -> None:
        """Copy-on-write: the copies take the place of the shared blocks."""
        for group, table in enumerate(self.tables):
            mine = copies.group == group
            table[copies.row[mine], copies.index[mine]] = copies.target[mine]

    def _join(self, joins: RowJoins) -> None:
        at = joins.row
        self.generation[at] = joins.generation
        self.num_prompt[at] = joins.num_prompt
        self.num_tokens[at] = joins.num_tokens
        self.computed[at] = joins.num_computed
        self.limit[at] = joins.limit
        self.ended[at] = self.decoding[at] = False
        for table in self.tables:
            table[at] = 0
        for row, tokens, sampling in zip(at.tolist(), joins.tokens, joins.sampling, strict=True):
            self.tokens[row, : len(tokens)] = tokens
            asked = sampling.prompt_logprobs
            self.prompt_logprobs[row] = -2 if asked is None else asked

    def _copy_rows(self, copies: RowCopies) -> None:
        columns = (copies.source.tolist(), copies.target.tolist(), copies.num_tokens.tolist())
        for source, target, count in zip(*columns, strict=True):
            self.tokens[target, :count] = self.tokens[source, :count]

    def _append(self, appends: BlockAppends) -> None:
        for group, table in enumerate(self.tables):
            mine = appends.group == group
            table[appends.row[mine], appends.index[mine]] = appends.block[mine]
