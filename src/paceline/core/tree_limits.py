"""Trees: a request and everything forked from it, with one budget and an order by score.

Places in a tree are exchanged inside it only: between trees and tenants the policy decides as it does without them.
Decision: docs/decisions/0041-trees.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import InvalidRequest

MAX_TREE_BRANCHES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """What all branches of a tree may have together; None: as much as any request."""

    max_rows: int | None = None  # branches that compute at the same time
    max_tokens: int | None = None  # that were generated, or may still be by live branches
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


class RequestTree:
    """The live branches of a tree, and what they have used."""

    __slots__ = ("is_scored", "limits", "members", "num_rows", "num_spent")

    def __init__(self, limits: TreeLimits) -> None:
        self.limits = limits
        self.members: dict[int, int] = {}  # requests, and how many tokens each may come to generate
        self.num_rows = 0
        self.is_scored = False  # a branch was given a score
        self.num_spent = 0  # tokens that branches have generated which have ended

    @property
    def has_rows(self) -> bool:
        """Whether one more of its branches may compute."""
        return self.limits.max_rows is None or self.num_rows < self.limits.max_rows

    def objection(self, num_branches: int, num_tokens: int) -> str:
        """Why it cannot have so many more branches, which may generate so many more tokens; "": it can."""
        limits = self.limits
        left = limits.max_branches - len(self.members)
        if num_branches > left:
            return f"the tree may have {limits.max_branches} branches: {left} are left, {num_branches} are asked for"
        if limits.max_tokens is None:
            return ""
        left = limits.max_tokens - self.num_spent - sum(self.members.values())
        if num_tokens <= left:
            return ""
        return (
            f"the tree may generate {limits.max_tokens} tokens: {max(0, left)} are left, {num_tokens} are asked for; "
            "prune branches, or give max_tokens"
        )
