"""The step that is being composed: what it has been given so far.

`compose()` makes one, every part of the step adds to it, and the plan is built from it. It is never carried over to
the next step; the last one stays readable for checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import RequestId

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]
NO_MASK: Mask = np.zeros(0, np.bool_)
NO_ROWS: Index = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class StepDraft:
    """One step, from empty to complete."""

    budget: int  # most tokens it may carry
    left: int  # of these, not given out yet
    spans: dict[int, int] = field(default_factory=dict)  # known tokens by row
    pads: dict[int, int] = field(default_factory=dict)  # padding tokens by row
    # Waiting requests that were passed over, and the request each was compared with.
    passed: dict[RequestId, RequestId] = field(default_factory=dict)
    remarks: dict[RequestId, str] = field(default_factory=dict)  # why no row is preempted for a request
    num_sparing: int = 0  # requests that were deferred to leave room for other tenants
    num_decoding: int = 0  # rows in plain decode
    num_sampled: int = 0  # rows that are sampled
    products: int = 0  # sum over the tokens of prompts of the context each attends to
    at_length: bool = False  # some row gets the last token its length allows
    advancing: Mask = field(
        default_factory=lambda: NO_MASK
    )  # decoding rows that get a token; padding does not
    held: Index = field(default_factory=lambda: NO_ROWS)  # decoding rows that leave this step to prompts

    def give(self, row: int, count: int, products: int) -> None:
        """`count` known tokens of a row are part of the step."""
        self.spans[row] = self.spans.get(row, 0) + count
        self.left -= count
        self.products += products

    def give_padding(self, row: int, count: int) -> None:
        self.pads[row] = self.pads.get(row, 0) + count
        self.left -= count
        self.products += count * count // 2

    @property
    def is_empty(self) -> bool:
        return not (self.num_decoding or self.spans or self.pads)
