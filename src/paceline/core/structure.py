"""What an answer must look like: a frozen, checked value, made from every form in which requests ask for it.

It crosses the process boundary as it is. The engine's guides (`paceline.text.guide`) turn it into a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import GrammarTooComplex, InvalidRequest

MAX_SOURCE_BYTES = 64 << 10
MAX_DEPTH = 32
# text: anything goes, which only makes sense with `after`.
KINDS = ("json_schema", "json_object", "regex", "lark", "gbnf", "choice", "structural_tag", "text")
# By the names of vLLM's `structured_outputs`, each with the kind it stands for.
FORMS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
# Beside json or json_object: no whitespace between the parts of the JSON.
COMPACT = "disable_any_whitespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The form of an answer.

    `source` is a JSON schema, a pattern, a grammar, a JSON list of choices or a JSON object of structural tags, by
    `kind`. `strict`: what the compiler does not know is refused instead of ignored. With `after`, text without rules
    comes first, up to and with this marker: reasoning. It has at most `within` tokens, then the marker is forced.
    """

    kind: str = "json_object"
    source: str = ""
    strict: bool = False
    after: str = ""
    within: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _refused(f"the kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        try:
            num_bytes = len(self.source.encode())
        except UnicodeEncodeError:
            raise _refused(f"{self.kind} holds half of a surrogate pair") from None
        if num_bytes > MAX_SOURCE_BYTES:
            raise GrammarTooComplex(
                f"structured_outputs: at most {MAX_SOURCE_BYTES >> 10} KiB of schema or grammar are accepted",
                param="structured_outputs",
            )
        if self.kind not in ("json_object", "text") and not self.source:
            raise _refused(f"{_form_of(self.kind)} is empty")
        if self.within is not None and (self.within < 0 or not self.after):
            raise _refused("within is a number of tokens before the marker of after")
        if self.kind in ("json_schema", "choice", "structural_tag"):
            _check_json(self.kind, self.source)

    @classmethod
    def of(cls, given: object) -> Structure:
        """From a `Structure`, or from a mapping with one of vLLM's names: json, regex, choice, grammar, json_object,
        structural_tag."""
        if isinstance(given, Structure):
            return given
        if not isinstance(given, Mapping):
            raise _refused(f"a mapping with one of {', '.join(FORMS)} is wanted, not {type(given).__name__}")
        given = dict(given)
        compact = given.pop(COMPACT, None)
        unknown = sorted(str(name) for name in given if name not in FORMS)
        if unknown:
            raise _refused(f"unknown: {', '.join(unknown)}; known: {', '.join(FORMS)}")
        forms = [name for name, value in given.items() if value is not None and value is not False]
        if len(forms) != 1:
            raise _refused(f"exactly one of {', '.join(FORMS)} is wanted, not {len(forms)}")
        structure = cls.named(forms[0], given[forms[0]])
        return structure._without_whitespace() if compact is True else structure

    @classmethod
    def named(cls, form: str, value: Any, *, strict: bool = False) -> Structure:
        """From one of the names of `FORMS` and its value, as JSON has it or written out."""
        kind = FORMS[form]
        if kind == "json_object":
            return cls(kind=kind)
        if kind in ("regex", "lark"):
            if not isinstance(value, str):
                raise _refused(f"{form} is a text, not {type(value).__name__}")
            # A grammar of llama.cpp writes its rules with ::=.
            return cls(kind="gbnf" if kind == "lark" and "::=" in value else kind, source=value)
        if kind == "choice" and (isinstance(value, str) or not isinstance(value, Sequence)):
            raise _refused(f"choice is a list of texts, not {type(value).__name__}")
        try:
            source = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(f"{form} is not JSON: {error}") from error
        return cls(kind=kind, source=source, strict=strict)

    def _without_whitespace(self) -> Structure:
        """The same JSON without whitespace between its parts."""
        if self.kind not in ("json_schema", "json_object"):
            raise _refused(f"{COMPACT} is for json and json_object")
        schema = json.loads(self.source) if self.source else {"type": "object"}
        rules = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        source = json.dumps(rules | {"x-guidance": {"whitespace_flexible": False}}, ensure_ascii=False)
        return replace(self, kind="json_schema", source=source)


def _form_of(kind: str) -> str:
    """The name that a client gives a kind."""
    return next((form for form, known in FORMS.items() if known == kind), kind)


def _check_json(kind: str, source: str) -> None:
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{_form_of(kind)} is not JSON: {error}") from error
    if kind == "choice":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(each, str) and each for each in value)
        ):
            raise _refused("choice is a list of at least one text, none of them empty")
    elif not isinstance(value, dict | bool if kind == "json_schema" else dict):
        raise _refused(f"{_form_of(kind)} is a JSON object")
    if _depth(value) > MAX_DEPTH:
        raise GrammarTooComplex(
            f"structured_outputs: {_form_of(kind)} is nested more than {MAX_DEPTH} levels deep",
            param="structured_outputs",
        )


def _depth(value: object) -> int:
    """How many objects and lists are inside each other; counting ends above what is allowed."""
    depth, level = 0, [value]
    while (inside := [each for each in level if isinstance(each, dict | list)]) and depth <= MAX_DEPTH:
        depth += 1
        level = [part for each in inside for part in (each.values() if isinstance(each, dict) else each)]
    return depth


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs: {what}", param="structured_outputs")
