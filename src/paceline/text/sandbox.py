"""The environment chat templates run in: Jinja's immutable sandbox, with every way to grow or loop under a budget.

Loops and calls are counted, operators and filters are checked before they make something large, and of filters and
methods only those that templates use are there. The notation is the one Hugging Face templates are written for.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from paceline.text import growth
from paceline.text.render_budget import RenderBudget, RenderLimits

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
                args = growth.check_method(owner, method.__name__, args, kwargs, budget)
        result = super().call(context, obj, *args, **kwargs)
        budget.check(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: RenderBudget = context.parent[BUDGET]
        growth.check_operator(operator, left, right, budget)
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
                growth.refuse()
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
        return len(self._items)  # type: ignore[arg-type]  # a TypeError tells Jinja that nobody knows

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.work()
            yield item


# -- filters and functions ---------------------------------------------------------------------------------


def _bounded_filter(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    check = growth.FILTERS.get(name)

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: RenderBudget = context.parent[BUDGET]
        budget.check(value)
        for argument in (*args, *kwargs.values()):
            budget.check(argument)
        if name == "join":
            value = growth.measured_list(budget, value)
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
