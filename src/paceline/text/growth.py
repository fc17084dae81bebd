"""How large the result of an operation in a chat template would be, found out before it is made.

One function per operator, filter or method that can make much out of little. Each refuses through the budget; none
computes the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError

from paceline.text.render_budget import MAX_BITS, RenderBudget, RenderLimitExceeded

MAX_COUNT = 100_000  # of columns, groups and other numbers that say how much
_WIDTH = 9_999  # of one formatted field
_WIDE = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # five digits, a width from an argument, a field inside a field

_OF_TEXT = (
    "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit "
    "islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix "
    "replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title "
    "upper zfill"
)
METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_OF_TEXT.split())),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index"))),
)


def refuse() -> NoReturn:
    raise RenderLimitExceeded("size")


def check_operator(operator: str, left: Any, right: Any, budget: RenderBudget) -> None:
    """The operators of templates; what is not named here makes nothing larger than its operands."""
    if operator == "+":
        budget.grow(budget.size(left) + budget.size(right))
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, Sequence) and isinstance(times, int):
                budget.grow((budget.size(value) + 1) * max(times, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MAX_BITS:
            refuse()
    elif operator == "%" and isinstance(left, str):
        arguments = right if isinstance(right, tuple) else (right,)
        check_format(budget, left, arguments, right if isinstance(right, Mapping) else {})


def check_format(budget: RenderBudget, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`%` and `format`: every field may show every argument once."""
    if _WIDE.search(text):
        refuse()
    shown = sum(budget.size(value) for value in (*args, *kwargs.values()))
    budget.grow(len(text) + (text.count("%") + text.count("{")) * (shown + _WIDTH))


def check_replace(budget: RenderBudget, text: object, old: object = "", new: object = "", *_: object) -> None:
    source, pattern = str(text), str(old)
    budget.grow(len(source) + source.count(pattern) * len(str(new)))


def check_indent(budget: RenderBudget, text: object, width: object = 4, *_: object, **__: object) -> None:
    columns = len(width) if isinstance(width, str) else width
    if not isinstance(columns, int) or columns > MAX_COUNT:
        refuse()
    source = str(text)
    budget.grow(len(source) + (source.count("\n") + 1) * columns)


def check_count(_: RenderBudget, __: object, *args: object, **kwargs: object) -> None:
    """Filters and methods whose numbers say how much to make."""
    if any(isinstance(value, int) and abs(value) > MAX_COUNT for value in (*args, *kwargs.values())):
        refuse()


def check_sum(_: RenderBudget, __: object, attribute: object = None, start: object = 0) -> None:
    if not isinstance(start, int | float):  # lists: each step would copy everything before it
        refuse()


def check_json(_: RenderBudget, __: object, *args: object, indent: object = None, **___: object) -> None:
    if args or (isinstance(indent, int) and indent > 16) or (isinstance(indent, str) and len(indent) > 16):
        refuse()


def check_join(budget: RenderBudget, items: object, separator: object = "", *_: object, **__: object) -> None:
    assert isinstance(items, list), "measured lists are made before"
    budget.grow(budget.size(items) + len(str(separator)) * len(items))


def measured_list(budget: RenderBudget, items: Iterable[Any]) -> list[Any]:
    """The items, as long as they stay within the limit together."""
    found: list[Any] = []
    total = 0
    for item in items:
        total += budget.size(item) + 1
        budget.grow(total)
        budget.work()
        found.append(item)
    return found


FILTERS: Mapping[str, Callable[..., None]] = {
    "replace": check_replace,
    "indent": check_indent,
    "batch": check_count,
    "slice": check_count,
    "round": check_count,
    "sum": check_sum,
    "tojson": check_json,
    "join": check_join,
    "format": lambda budget, text, *args, **kwargs: check_format(budget, str(text), args, kwargs),
}


def check_method(
    owner: object, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget: RenderBudget
) -> tuple[Any, ...]:
    """Refuse a method templates have no use for, or one that would make too much; the arguments to call it with."""
    allowed = next((names for kind, names in METHODS if isinstance(owner, kind)), frozenset())
    if name not in allowed:
        raise SecurityError(f"templates may not call {name!r} of a {type(owner).__name__}")
    if not isinstance(owner, str):
        return args
    budget.work(1 + len(owner) // 1024)
    if name == "replace":
        check_replace(budget, owner, *args)
    elif name == "format":
        check_format(budget, owner, args, kwargs)
    elif name in ("center", "ljust", "rjust", "zfill"):
        check_count(budget, owner, *args)
    elif name == "join" and args:
        items = measured_list(budget, args[0])
        check_join(budget, items, owner)
        return (items,)
    return args
