"""The fields by which requests ask for a form of the answer, and the `Structure` each of them stands for.

One request has one form. What is wrong with it is said of the field that the client used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.structure import FORMS, Structure
from paceline.errors import InvalidRequest
from paceline.server.api.fields import Field, Kind, kind, list_of, shaped, text, without_effect

MAX_CHOICES = 8192
FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_FORMAT_SCHEMA = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": list(FORMAT_TYPES)}},
    "required": ["type"],
}
_FORMAT = shaped((dict,), "an object with a type", _FORMAT_SCHEMA)
_SCHEMA = shaped((dict, str, bool), "a JSON schema")
_OWN_NAME = "structured_outputs"  # by which a Structure calls itself in errors


def openai_fields() -> list[Field]:
    """Of chat and completions: OpenAI's field, vLLM's, vLLM's older ones, SGLang's and llama.cpp's."""
    return [
        Field("response_format", _FORMAT, "form of the answer: text, json_object or json_schema"),
        Field(
            "structured_outputs",
            shaped((dict,), f"an object with one of {', '.join(FORMS)}", {"type": "object"}),
            f"form of the answer, by one of {', '.join(FORMS)}",
        ),
        Field("guided_json", _SCHEMA, "as structured_outputs.json"),
        Field("guided_regex", text(1), "as structured_outputs.regex"),
        Field("guided_choice", list_of(text(1), MAX_CHOICES, 1), "as structured_outputs.choice"),
        Field("guided_grammar", text(1), "as structured_outputs.grammar"),
        Field("json_schema", _SCHEMA, "as structured_outputs.json"),
        Field("regex", text(1), "as structured_outputs.regex"),
        Field("ebnf", text(1), "as structured_outputs.grammar"),
        Field("grammar", text(1), "as structured_outputs.grammar"),
        without_effect("guided_decoding_backend", text(0, 128)),
        without_effect("guided_whitespace_pattern", text(0, 1024)),
    ]


def responses_fields() -> list[Field]:
    return [Field("text", _holder("verbosity"), "format: form of the answer")]


def anthropic_fields() -> list[Field]:
    return [
        Field("output_config", _holder("effort"), "format: form of the answer"),
        Field("output_format", _FORMAT, "as output_config.format"),
    ]


def _holder(other: str) -> Kind:
    """An object with a format, beside a name that changes nothing about it."""
    schema = {"type": "object", "properties": {"format": _FORMAT_SCHEMA, other: {"type": "string"}}}
    expected = f"an object with format and {other}"
    return kind(
        expected, schema, lambda value: isinstance(value, dict) and not set(value) - {"format", other}
    )


def structure_field(given: Mapping[str, Any]) -> str:
    """The name of the field that asks for a form of the answer; "" where all ask for text."""
    names = [name for name in _READERS if name in given and not _is_text(name, given[name])]
    if len(names) > 1:
        message = f"{names[0]} and {names[1]} both ask for a form of the answer; give one of them"
        raise InvalidRequest(message, param=names[1])
    return names[0] if names else ""


def structure_of(given: Mapping[str, Any]) -> Structure | None:
    """The form a body asks for. Raises InvalidRequest whose `param` is the field."""
    name = structure_field(given)
    if not name:
        return None
    try:
        return _READERS[name](given[name])
    except InvalidRequest as error:
        said = str(error).removeprefix(f"{_OWN_NAME}: ")
        raise type(error)(f"{name}: {said}", param=name) from None


def _is_text(name: str, value: Any) -> bool:
    form = value.get("format") if name in _HOLDERS else value
    return form is None or (name in _WITH_TYPE and isinstance(form, dict) and form.get("type") == "text")


def _response_format(value: Mapping[str, Any]) -> Structure:
    """OpenAI's and Anthropic's object. Chat has name, schema and strict one level deeper than the others."""
    form = value.get("type")
    if form not in FORMAT_TYPES:
        raise InvalidRequest(f"type must be one of {', '.join(FORMAT_TYPES)}")
    if form != "json_schema":
        return Structure.named(form, value)
    inner = value.get("json_schema", value)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("a format of type json_schema has a schema, a JSON object")
    strict = inner.get("strict")
    if type(strict) is not bool and strict is not None:
        raise InvalidRequest("strict must be true or false")
    return Structure.named("json", schema, strict=bool(strict))


def _format_inside(value: Mapping[str, Any]) -> Structure:
    form = value["format"]
    if not isinstance(form, dict):
        raise InvalidRequest("format must be an object with a type")
    return _response_format(form)


def _form(name: str) -> Callable[[Any], Structure]:
    return lambda value: Structure.named(name, value)


_READERS: Mapping[str, Callable[[Any], Structure]] = {
    "response_format": _response_format,
    "structured_outputs": Structure.of,
    "guided_json": _form("json"),
    "guided_regex": _form("regex"),
    "guided_choice": _form("choice"),
    "guided_grammar": _form("grammar"),
    "json_schema": _form("json"),
    "regex": _form("regex"),
    "ebnf": _form("grammar"),
    "grammar": _form("grammar"),
    "text": _format_inside,
    "output_config": _format_inside,
    "output_format": _response_format,
}
STRUCTURE_FIELDS = frozenset(_READERS)
_HOLDERS = ("text", "output_config")
_WITH_TYPE = ("response_format", "output_format", *_HOLDERS)
