"""Trees: a request and everything forked from it, with one budget and an order by score.

Places in a tree are exchanged inside it only: between trees and tenants the policy decides as it does without them.
Decision: docs/decisions/0041-trees.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.request import RequestId
from paceline.errors import InvalidRequest

MAX_TREE_BRANCHES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """What all branches of a tree may have together; None: as much as any request."""

    max_rows: int | None = None  # branches that compute at the same time
    max_tokens: int | None = None  # output: generated, and what live branches may still generate
    max_branches: int = MAX_TREE_BRANCHES  # that are alive, the first one counted

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_tokens", "max_branches"):
            limit = getattr(self, name)
            if limit is None and name != "max_branches":
                continue
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise InvalidRequest(
                    f"tree.{name} must be a whole number from 1 on, not {limit!r}", param="tree"
                )
        if self.max_branches > MAX_TREE_BRANCHES:
            raise InvalidRequest(
                f"tree.max_branches must be at most {MAX_TREE_BRANCHES}, not {self.max_branches}",
                param="tree",
            )


class Tree:
    """The live branches of a tree, and what they have used."""

    __slots__ = ("limits", "members", "num_rows", "num_spent", "root")

    def __init__(self, root: RequestId, limits: TreeLimits) -> None:
        self.root = root
        self.limits = limits
        self.members: dict[RequestId, int] = {}  # and the output tokens each may come to at most
        self.num_rows = 0
        self.num_spent = 0  # output tokens of branches that have ended

    @property
    def tokens_left(self) -> int | None:
        if self.limits.max_tokens is None:
            return None
        return max(0, self.limits.max_tokens - self.num_spent - sum(self.members.values()))

    @property
    def branches_left(self) -> int:
        return max(0, self.limits.max_branches - len(self.members))
