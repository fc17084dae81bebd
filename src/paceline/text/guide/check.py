"""Whether a structure compiles, and what of it the compiler ignores: asked before a request is accepted. And where a
pattern finds the answer in a text.

`check` and `last_match` ask in this process. A server asks a separate one (`checkers.py`), which is this module run
with `python -m`: it reads a question per line and answers each with a line, and can be killed.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from paceline.core.structure import Structure
from paceline.errors import GrammarTooComplex, InvalidRequest
from paceline.text.guide.grammar import grammar_of
from paceline.text.guide.matcher import MISSING, TOO_MANY, is_installed

_logger = logging.getLogger("paceline")

FIELD = "structured_outputs"
MAX_SENTENCE = 300
ENDLESS = "needs itself without end, so that no answer is ever complete"
MAX_IGNORED = 16
# Memory of the process that checks: what needs more is too complex.
WORKER_BYTES = 2 << 30
_LOOK_FOR_PLACE_S = 0.2
# Said of control tokens, which only the engine's tokenizer knows.
_NO_TOKENIZER = "no tokenizer"
_TOO_MUCH = re.compile(r"(schema|grammar|parser|lexer)\b.* too (large|big|complex|deep)|limit exceeded", re.I)
_LINE = re.compile(r"^at \d+\(\d+\): ")  # of the grammar that a structure becomes
_DRAWN = re.compile(r"\s*(\d+ \|.*|\^+)\s*")  # a line of a grammar with its number, and what points into it
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarVerdict:
    """What is known of a structure: `error` is "" for one that compiles."""

    error: str = ""
    too_complex: bool = False
    ignored: tuple[str, ...] = ()  # keywords of a schema, such as `not` or `format.byte`
    has_control_tokens: bool = False  # which only a program may write, never a client

    @classmethod
    def read(cls, line: bytes | str) -> GrammarVerdict:
        """From what a checking process writes."""
        found = json.loads(line)
        return cls(**{**found, "ignored": tuple(found["ignored"])})

    def approve(self, field: str, *, control_tokens: bool = True) -> tuple[str, ...]:
        """The names of what is ignored, below the field that asked. Raises what is wrong, naming the field."""
        if self.has_control_tokens and not control_tokens:
            raise InvalidRequest(
                f"{field}: a grammar cannot name tokens (<...>); write their text", param=field
            )
        if self.error:
            kind = GrammarTooComplex if self.too_complex else InvalidRequest
            raise kind(f"{field}: {self.error}", param=field)
        return tuple(f"{field}.{name}" for name in self.ignored)


def check(structure: Structure, field: str = FIELD) -> tuple[str, ...]:
    """Check in this process; the names of what is ignored. Raises InvalidRequest or GrammarTooComplex."""
    check_installed(field)
    return _known_verdict(question(structure)).approve(field)


def check_installed(field: str = FIELD) -> None:
    if not is_installed():
        raise InvalidRequest(f"{field}: {MISSING}", param=field)


def question(structure: Structure) -> Structure:
    """The part of a structure that is checked: reasoning before it always compiles."""
    return replace(structure, after="", within=None) if structure.after else structure


def verdict_of(structure: Structure) -> GrammarVerdict:
    """Compile it once, without a vocabulary, and look whether an answer can begin and end."""
    from llguidance import LLMatcher

    try:
        grammar = grammar_of(structure, lambda _: None)
    except InvalidRequest as error:
        return _failed(str(error).removeprefix(f"{FIELD}: "))
    is_wrong, notes = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        sentence = notes[0] if notes else "it does not compile"
        if structure.kind not in ("lark", "gbnf"):
            sentence = _LINE.sub("", sentence)
        return _failed(sentence, place=_place_of(structure, sentence))
    if endless := _endless(structure):
        return _failed(f"{endless} {ENDLESS}")
    has_control_tokens = any(note.startswith(_NO_TOKENIZER) for note in notes)
    if not has_control_tokens and (fault := _first_mask_fault(grammar)):
        return _failed(fault)
    names = dict.fromkeys(name for note in notes for name in _ignored_names(note))
    return GrammarVerdict(ignored=tuple(names)[:MAX_IGNORED], has_control_tokens=has_control_tokens)


@lru_cache(maxsize=256)
def _known_verdict(structure: Structure) -> GrammarVerdict:
    verdict = verdict_of(structure)
    if verdict.ignored:  # once for each structure; a server says it in a header instead
        _logger.warning("structured_outputs: ignored are %s", ", ".join(verdict.ignored))
    return verdict


def _failed(sentence: str, *, place: str = "") -> GrammarVerdict:
    """A sentence of llguidance may draw its place below; that is left out, for a client does not know those lines."""
    lines = (line for line in sentence.splitlines() if not _DRAWN.fullmatch(line))
    said = " ".join(" ".join(lines).split())[: MAX_SENTENCE - len(place) - 5]
    return GrammarVerdict(
        error=f"{said} (at {place})" if place else said, too_complex=bool(_TOO_MUCH.search(said))
    )


def _first_mask_fault(grammar: str) -> str:
    """Rules that only refer to each other compile, and then allow nothing."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    if matcher.is_error():
        return str(matcher.get_error())
    matcher.compute_bitmask()
    if not matcher.is_error():
        forced = matcher.compute_ff_tokens()
        matcher.consume_tokens(forced[:1])
        matcher.compute_bitmask()
        return f"a rule {ENDLESS}" if forced and TOO_MANY in matcher.get_error() else ""
    sentence = str(matcher.get_error()).partition("<state>")[0]  # behind it come counters
    return "no answer can match it" if sentence.startswith("NoExtension") else sentence


@lru_cache(maxsize=1)
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _ignored_names(note: str) -> Iterator[str]:
    """Keywords out of llguidance's sentences about what it leaves out of a schema."""
    if note.startswith(_NO_TOKENIZER):
        return
    what, _, rest = note.partition(": ")
    if what == "Unimplemented keys":
        names = json.loads(rest)
    elif what == "Unknown format":
        names = [f"format.{rest}"]
    elif note.startswith("min/max"):
        names = ["minProperties", "maxProperties"]
    else:
        names = [note.split(maxsplit=1)[0]]
    yield from (_NAME.sub("", name) for name in names)


# Where in a schema the fault is: llguidance does not say.


def _place_of(structure: Structure, sentence: str) -> str:
    """The innermost part of a schema that fails with the same sentence, as a JSON pointer; "" where it is not found."""
    if structure.kind != "json_schema":
        return ""
    schema, place = json.loads(structure.source), ""
    shared = {
        name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema
    }
    until_s = time.monotonic() + _LOOK_FOR_PLACE_S
    while found := next(
        (
            (at, part)
            for at, part in _parts(schema)
            if _fails_alike(part, shared, structure.strict, sentence, until_s)
        ),
        None,
    ):
        place, schema = f"{place}/{found[0]}", found[1]
    return place[:100]


def _fails_alike(part: Any, shared: Mapping[str, Any], strict: bool, sentence: str, until_s: float) -> bool:
    from llguidance import LLMatcher

    if time.monotonic() > until_s or not isinstance(part, dict):
        return False
    alone = Structure(kind="json_schema", source=json.dumps({**shared, **part}), strict=strict)
    return sentence in LLMatcher.validate_grammar_with_warnings(grammar_of(alone, lambda _: None))[1]


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Schemas directly inside a schema."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            yield from ((f"{keyword}/{name}", part) for name, part in value.items())
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            yield from ((f"{keyword}/{index}", part) for index, part in enumerate(value))
        elif keyword in ("items", "additionalProperties"):
            yield keyword, value


# Schemas whose every value would hold another of their kind.


def _endless(structure: Structure) -> str:
    """The first reference that every answer would have to follow for ever, or ""."""
    if structure.kind != "json_schema":
        return ""
    schema = json.loads(structure.source)
    return _endless_from(schema, schema, ())


def _endless_from(schema: Any, root: Any, followed: tuple[str, ...]) -> str:
    if not isinstance(schema, dict):
        return ""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in followed:
            return f"the reference {reference}"
        target = _resolved(root, reference)
        if found := _endless_from(target, root, (*followed, reference)):
            return found
    ways: list[Any] = next(
        (schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), []
    )
    ends = [_endless_from(way, root, followed) for way in ways]
    needed = [*_needed(schema), *(schema["allOf"] if isinstance(schema.get("allOf"), list) else ())]
    found = next(filter(None, (_endless_from(part, root, followed) for part in needed)), "")
    return found or (ends[0] if ends and all(ends) else "")


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Parts that a value of this schema cannot do without."""
    kinds, properties, required = schema.get("type"), schema.get("properties"), schema.get("required")
    if kinds == "object" and isinstance(properties, dict) and isinstance(required, list):
        yield from (properties[name] for name in required if isinstance(name, str) and name in properties)
    least = schema.get("minItems")
    if kinds == "array" and isinstance(least, int) and least > 0:
        yield schema.get("items")


def _resolved(root: Any, reference: str) -> Any:
    """What a reference inside the schema points at; None for others, which the compiler refuses."""
    if not reference.startswith("#"):
        return None
    found = root
    for name in filter(None, reference[1:].split("/")):
        key = name.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """What the first group of a pattern, or all of it, has matched in a text: the last place that is not empty."""
    number = 1 if pattern.groups else 0
    found = [(match.group(number) or "").strip() for match in pattern.finditer(text)]
    return next((each for each in reversed(found) if each), None)


def main() -> None:
    """Answer until the input ends, as it does when the server is gone."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    if is_installed():
        _byte_tokenizer()  # loaded before it is called ready
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "pattern" in asked:
            answer: Any = last_match(re.compile(asked["pattern"]), asked["text"])
        else:
            answer = asdict(verdict_of(Structure(**asked)))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
