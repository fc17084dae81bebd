"""How the values that every step makes anew are declared.

A `@value` is a dataclass with slots and keyword arguments that the type checker holds frozen. At run time it is not:
freezing makes a value two to three times as dear to make, and the parts of plans, views and events are made in each
step. What crosses the runner's seam as a whole, `StepPlan` and `StepResult`, is frozen at run time too: a named
tuple is, and costs little to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Kind = TypeVar("Kind")


@dataclass_transform(eq_default=False, kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def value(kind: type[Kind]) -> type[Kind]:
    """Declare a value that is never changed after it was made; two are equal only when they are one."""
    return dataclass(slots=True, kw_only=True, eq=False)(kind)
