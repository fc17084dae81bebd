"""The environment chat templates run in: Jinja's immutable sandbox, with every way to grow or loop under a budget.

Loops and calls are counted, operators and filters are checked before they make something large, and of filters and
methods only those that templates use are there. The notation is the one Hugging Face templates are written for.
"""

from __future__ import annotations

import json
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# How much a chat template may compute: processor time, the size of every value, the length of its output.
#
# A template comes with a model file, so it is code from somewhere else. Every value it can hold, written out in
# full, stays below one limit; that is what keeps any single operation short, and work between two looks at the
# clock too. The clock is that of the rendering thread, so a busy machine does not make a good template fail.


MAX_DEPTH = 64
MAX_BITS = 4096  # of a whole number
_STRIDE = 256  # units of work between two looks at the clock
_REMEMBERED = 1024
# What a value that is not text counts for, in characters.
_ITEM = 16


class RenderLimitExceeded(Exception):
    """The template wanted more than it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may take."""

    seconds: float = 0.25  # of processor time
    seconds_per_message: float = 0.0005  # on top, so that long conversations are not refused for their length
    max_chars: int = 4_000_000  # of the output, and of any value on the way


class RenderBudget:
    """The account of one rendering."""

    def __init__(self, limits: RenderLimits, *, num_messages: int = 0) -> None:
        self.limits = limits
        self._deadline = time.thread_time() + limits.seconds + num_messages * limits.seconds_per_message
        self._work = 0
        # Sizes of lists and dictionaries seen lately, with the values, so that their identities stay theirs.
        self._sizes: dict[int, tuple[object, int]] = {}

    def work(self, units: int = 1) -> None:
        """Account for work; a unit is a step of a loop or a thousand characters."""
        self._work += units
        if self._work >= _STRIDE:
            self._work = 0
            if time.thread_time() > self._deadline:
                raise RenderLimitExceeded("time")

    def check(self, value: object) -> None:
        """Refuse a value that, written out, would be too large; account for having made it."""
        size = self.size(value)
        self.grow(size)
        self.work(1 + size // 1024)

    def grow(self, size: int) -> None:
        """Refuse to make a value of this size."""
        if size > self.limits.max_chars:
            raise RenderLimitExceeded("size")

    def size(self, value: object, depth: int = 0) -> int:
        """How large a value is, written out in full: shared parts count as often as they appear."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise RenderLimitExceeded("number")
            return _ITEM
        if isinstance(value, range):
            return _ITEM * len(value)
        if not isinstance(value, list | tuple | Mapping | set):
            return _ITEM
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = self._contents(value, depth)
        self.remember(value, size)
        return size

    def remember(self, value: object, size: int) -> None:
        """Note the size of a list or dictionary, so that it need not be counted again; templates cannot change it."""
        if len(self._sizes) >= _REMEMBERED:
            self._sizes.clear()
        self._sizes[id(value)] = (value, size)

    def _contents(
        self, value: list[object] | tuple[object, ...] | Mapping[object, object] | set[object], depth: int
    ) -> int:
        if depth > MAX_DEPTH:
            raise RenderLimitExceeded("depth")
        total = 0
        parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        for part in parts:
            total += _ITEM + self.size(part, depth + 1)
            self.grow(total)
            self.work()
        return total


# How large the result of an operation in a chat template would be, found out before it is made.
#
# One function per operator, filter or method that can make much out of little. Each refuses through the budget;
# none computes the result.


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


GROWTH_CHECKS: Mapping[str, Callable[..., None]] = {
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


# Under a name no template can spell.
BUDGET, EACH, JOINED, MADE = "the budget", "each of", "joined parts", "made here"

_FILTERS = (
    "abs attr batch capitalize count d default dictsort e escape first float format groupby indent int items join "
    "last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort "
    "string sum title tojson trim unique upper wordcount"
)
FILTERS = tuple(_FILTERS.split())


class TemplateRefused(Exception):
    """The template itself called `raise_exception`."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which a rendering has a `RenderBudget` in its context."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, limits: RenderLimits, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._limits = limits
        plain = ImmutableSandboxedEnvironment()  # where the filters themselves are
        plain.filters["tojson"] = _tojson
        self.filters = {name: _bounded_filter(plain, name) for name in FILTERS}
        self.filters |= {EACH: _each, JOINED: _joined, MADE: _made}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: _strftime(now(), pattern)
        self.globals["namespace"] = _BoundedNamespace
        self.globals["dict"] = _dict
        self.concat = self._concat  # type: ignore[method-assign]

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget: RenderBudget = context.parent[BUDGET]
        for value in (*args, *kwargs.values()):
            budget.check(value)
        method = getattr(obj, "__wrapped__", obj) if isinstance(obj, types.FunctionType) else obj
        if isinstance(method, types.BuiltinMethodType | types.MethodType):
            owner = method.__self__
            if isinstance(owner, str | list | tuple | dict | int | float):
                args = check_method(owner, method.__name__, args, kwargs, budget)
        result = super().call(context, obj, *args, **kwargs)
        budget.check(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: RenderBudget = context.parent[BUDGET]
        check_operator(operator, left, right, budget)
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, list):  # how templates gather: one more each time
            budget.remember(result, budget.size(left) + budget.size(right))
        budget.check(result)
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bounded: nodes.Template = _Bounding().visit(template)
        bounded.set_environment(self)
        return bounded

    def _concat(self, pieces: Iterable[str]) -> str:
        """Joins what a macro or a block wrote; it has no context, so the limit alone holds."""
        found: list[str] = []
        total = 0
        for piece in pieces:
            total += len(piece)
            if total > self._limits.max_chars:
                refuse()
            found.append(piece)
        return "".join(found)


class _Bounding(NodeTransformer):
    """Puts the budget into a parsed template: around what loops run over, joined texts, and new lists."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, EACH)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(parts, JOINED)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx == "store":  # names that are assigned to
            return self.generic_visit(node)
        return self._literal(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node, [pair.value for pair in node.items])

    def _literal(self, node: nodes.Expr, parts: Sequence[nodes.Expr]) -> nodes.Node:
        """A list of constants is as large as the template says; one that holds values may hold itself twice."""
        is_constant = all(isinstance(part, nodes.Const) for part in parts)
        self.generic_visit(node)
        return node if is_constant else _filtered(node, MADE)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here only its contents matter."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BoundedNamespace(Namespace):
    """Jinja's namespace, without private names and without showing its contents when it is printed."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError("templates may not use private names in a namespace")


class _Counted:
    """What a loop runs over; each step is accounted for."""

    def __init__(self, items: Iterable[Any], budget: RenderBudget) -> None:
        self._items = items
        self._budget = budget

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError tells Jinja that it is unknown

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.work()
            yield item


# -- filters and functions ---------------------------------------------------------------------------------


def _bounded_filter(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    check = GROWTH_CHECKS.get(name)

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: RenderBudget = context.parent[BUDGET]
        budget.check(value)
        for argument in (*args, *kwargs.values()):
            budget.check(argument)
        if name == "join":
            value = measured_list(budget, value)
        if check is not None:
            check(budget, value, *args, **kwargs)
        result = plain.call_filter(name, value, args, kwargs, context=context, eval_ctx=context.eval_ctx)
        budget.check(result)
        return result

    return bounded


@pass_context
def _each(context: Context, items: Any) -> Any:
    return _Counted(items, context.parent[BUDGET])


@pass_context
def _joined(context: Context, parts: list[Any]) -> str:
    budget: RenderBudget = context.parent[BUDGET]
    budget.check(parts)
    return "".join(map(str, parts))


@pass_context
def _made(context: Context, value: Any) -> Any:
    context.parent[BUDGET].check(value)
    return value


def _tojson(value: Any, **options: Any) -> str:
    known = ("ensure_ascii", "indent", "separators", "sort_keys")
    if not set(options) <= set(known):
        raise SecurityError("tojson takes ensure_ascii, indent, separators and sort_keys")
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: object = "") -> None:
    raise TemplateRefused(message)


def _strftime(moment: datetime, pattern: object) -> str:
    if (
        not isinstance(pattern, str)
        or len(pattern) > 100
        or any(character.isdigit() for character in pattern)
    ):
        raise SecurityError("strftime_now takes a short pattern without widths")
    return moment.strftime(pattern)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
