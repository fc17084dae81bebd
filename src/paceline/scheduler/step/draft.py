"""The step that is being composed: what it has been given so far.

`compose()` makes one, every part of the step adds to it, and the plan is built from it. It is never carried over to
the next step; the last one stays readable for checks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import RequestId

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]
NO_MASK: Mask = np.zeros(0, np.bool_)
NO_ROWS: Index = np.zeros(0, np.int64)


class StepDraft:
    """One step, from empty to complete."""

    # A step pays for what it sets: what most steps leave alone is a default of the class.
    num_sparing = 0  # requests that were deferred to leave room for other tenants
    num_decoding = 0  # rows in plain decode
    num_sampled = 0  # rows that are sampled
    products = 0  # sum over the tokens of prompts of the context each attends to
    at_length = False  # some row gets the last token its length allows
    advancing = NO_MASK  # decoding rows that get a token; padding does not
    held = NO_ROWS  # decoding rows that leave this step to prompts
    # Rows of which drafts are under way: how far they are is known only within bounds; None: there are none.
    unsure: Mask | None = None
    first: Index | None = None  # first position that each decoding row may write; None: no drafts are made
    draft_width = 0  # most guessed tokens of a row
    draft_tokens = 0  # of all rows

    def __init__(self, budget: int) -> None:
        self.budget = budget  # most tokens it may carry
        self.left = budget  # of these, not given out yet
        self.spans: dict[int, int] = {}  # known tokens by row
        self.pads: dict[int, int] = {}  # padding tokens by row
        # Waiting requests that were passed over, and the request each was compared with.
        self.passed: dict[RequestId, RequestId] = {}
        self.remarks: dict[RequestId, str] = {}  # why no row is preempted for a request
