"""Searches: ways to a better answer by several branches of one prompt. See docs/guides/trees.md.

Each is a class whose fields are its options, with the sampling it needs and a coroutine over a tree; it knows neither
the engine nor where the tree lives.
"""

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest, did_you_mean
from paceline.llm.search.base import Candidate, Search, SearchResult
from paceline.llm.search.searches import Beam, BestOf, Probe, SelfConsistency, TreeOfThought

SEARCHES: Mapping[str, type[Search]] = {
    "best_of": BestOf,
    "self_consistency": SelfConsistency,
    "beam": Beam,
    "tree_of_thought": TreeOfThought,
    "probe": Probe,
}


def make_search(kind: str, options: Mapping[str, Any]) -> Search:
    """Raises InvalidRequest for a kind or an option that does not exist, and for a value out of range."""
    if kind not in SEARCHES:
        known = ", ".join(SEARCHES)
        raise InvalidRequest(f"there is no search {kind!r:.40}; there are {known}", param="search")
    made = SEARCHES[kind]
    for name in options:
        if name not in made.__dataclass_fields__:
            hint = did_you_mean(name, made.__dataclass_fields__)
            raise InvalidRequest(f"the search {kind} has no option {name:.40}{hint}", param="search")
    return made(**options)


__all__ = [
    "SEARCHES",
    "Candidate",
    "Search",
    "SearchResult",
    "make_search",
]
