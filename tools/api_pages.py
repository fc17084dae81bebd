"""Writes docs/reference/http-api.md and docs/reference/python-api.md from the routes and the classes themselves.

`python -m tools.api_pages` writes both pages; a test compares them with what it would write. Routes are made without
an engine: what describes them needs none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from paceline import LLM, AsyncLLM, CompletionOutput, RequestOutput, SamplingParams
from paceline.config.server import ServerConfig
from paceline.core.sampling import PARAMETERS
from paceline.llm.outputs import RequestMetrics
from paceline.server.access.keys_file import Keyring
from paceline.server.api.route import Route
from paceline.server.app import Application, openapi_document
from paceline.server.health import PUBLIC

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "Generated from the code by `make options`."
HTTP_HEAD = (
    f"# HTTP API\n\n{NOTE} A server shows the same at `/docs`, with search, examples of answers and a form that sends "
    "requests, and for tools at `/openapi.json`. Rules, defaults and errors: [requests](requests.md), "
    "[limits](limits.md). Every route needs a key where the server has keys, except "
    f"{', '.join(f'`{path}`' for path in sorted(PUBLIC))}; the pages ask for one. Routes under `/v1/admin` need an "
    "[admin key](../guides/keys.md#a-key-for-the-operator).\n"
)
PYTHON_HEAD = (
    f"# Python API\n\n{NOTE} `from paceline import LLM, AsyncLLM, SamplingParams`. Names are vLLM's where it has them. "
    "`LLM` and `AsyncLLM` take a model (a folder, a .gguf file, a name on the hub; default: SmolLM2-135M-Instruct) "
    "and every option of the engine ([`serve`](options.md#paceline-serve), [`sim`](options.md#paceline-sim)) by its "
    "name in Python: `max_num_seqs=64`, "
    '`scheduling_policy="fair"`, `run_log="run.jsonl.gz"`. Both are context managers: `with LLM() as llm:`, '
    "`async with AsyncLLM() as llm:`. Features of vLLM that Paceline does not have (embeddings, "
    "images, several GPUs) are rejected with an error that says what to do instead; None and False are "
    "accepted.\n"
)
CLASSES = (LLM, AsyncLLM)
VALUES = (SamplingParams, RequestOutput, CompletionOutput, RequestMetrics)


def pages() -> dict[Path, str]:
    return {FOLDER / "http-api.md": http_page(), FOLDER / "python-api.md": python_page()}


# ---------------------------------------------------------------- HTTP


def http_page() -> str:
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in openapi_document(all_routes())["paths"].items()
        for method, operation in methods.items()
        if method != "head"
    ]
    parts = [HTTP_HEAD, "\n| route | what it does |\n|---|---|\n"]
    parts += [f"| `{name}` | {operation.get('summary', '')} |\n" for name, operation in operations]
    for name, operation in operations:
        fields = _body_fields(operation)
        if fields:
            parts.append(f"\n## {name}\n\n| field | type | meaning |\n|---|---|---|\n")
            parts += [f"| `{field}` | {_cell(kind)} | {_cell(text)} |\n" for field, kind, text in fields]
    return "".join(parts)


def _body_fields(operation: dict[str, Any]) -> list[tuple[str, str, str]]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    return [
        (name, _kind_of(entry), str(entry.get("description", "")))
        for name, entry in schema.get("properties", {}).items()
    ]


def _kind_of(entry: dict[str, Any]) -> str:
    alternatives = entry.get("anyOf") or entry.get("oneOf")
    if alternatives:
        return " or ".join(dict.fromkeys(_kind_of(alternative) for alternative in alternatives))
    kind = entry.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def all_routes() -> list[Route]:
    """Every route of a server that has files and batches."""
    from paceline.llm.pairs import PooledModel
    from paceline.server.api.batch_routes import batch_routes, file_routes
    from paceline.server.api.routes import routes
    from paceline.server.generate.served_model import ServiceSettings

    settings = ServiceSettings()
    model = SimpleNamespace(pooled=PooledModel(tokenizer=None))
    nothing = cast(Any, SimpleNamespace(settings=settings, model=model, explanations=None))
    batches = [*file_routes(nothing), *batch_routes(nothing, settings.limits, strict=False)]
    application = Application(ServerConfig(), nothing, Keyring([]))
    return [*routes(nothing, batches), *application.main.table.routes]


# ---------------------------------------------------------------- Python


def python_page() -> str:
    parts = [PYTHON_HEAD]
    for kind in CLASSES:
        parts.append(f"\n## {kind.__name__}\n\n{inspect.getdoc(kind)}\n")
        for name, member in _members(kind):
            parts.append(f"\n### {kind.__name__}.{name}\n\n```python\n{_signature(name, member)}\n```\n")
            if inspect.getdoc(member):
                parts.append(f"{_paragraph(member)}\n")
    for value in VALUES:
        parts.append(f"\n## {value.__name__}\n\n{inspect.getdoc(value)}\n\n| field | type | default | |\n")
        parts.append("|---|---|---|---|\n")
        parts += [f"| {' | '.join(row)} |\n" for row in _fields(value)]
    return "".join(parts)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield name, member


def _signature(name: str, member: Any) -> str:
    if isinstance(member, property):
        returned = inspect.signature(cast(Any, member.fget)).return_annotation
        return f"{name}: {returned}"
    found = inspect.signature(member)
    # What takes everything else only refuses it.
    given = found.replace(
        parameters=[p for p in found.parameters.values() if p.name not in ("self", "unsupported")]
    )
    text = f"{'async ' if inspect.iscoroutinefunction(member) else ''}def {name}{given}"
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are kept as text
    return text if len(text) <= 100 else _one_per_line(text)


def _one_per_line(text: str) -> str:
    """A long signature with a parameter on each line; commas inside brackets separate no parameters."""
    start, _, rest = text.partition("(")
    inner, _, end = rest.rpartition(")")
    parts, depth, last = [], 0, 0
    for place, letter in enumerate(inner):
        depth += letter in "[("
        depth -= letter in "])"
        if letter == "," and depth == 0:
            parts.append(inner[last:place].strip())
            last = place + 1
    parts.append(inner[last:].strip())
    return f"{start}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def _paragraph(member: Any) -> str:
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(member) or "")


def _fields(kind: Any) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and the comment that stands beside or above each field."""
    if kind is SamplingParams:
        for spec in PARAMETERS.values():
            type_name = SamplingParams.__annotations__[spec.name]
            yield f"`{spec.name}`", _cell(type_name), f"`{_written(spec.default)}`", _cell(spec.help)
        return
    above: list[str] = []
    lines = iter(inspect.getsource(kind).splitlines())
    for line in lines:
        remark = re.fullmatch(r"    # (.*)", line)
        found = re.match(r"    (\w+): ([^=#]+?)(?: = (.*?))?(?:  # (.*))?$", line)
        if line.startswith(("    def ", "    @")):
            return
        if remark is not None:
            above.append(remark.group(1))
        elif found is not None:
            name, type_name, default, comment = found.groups()
            while default is not None and default.count("(") > default.count(")"):
                part, _, more = next(lines).partition("  # ")
                default, comment = default + part.strip(), more or comment
            yield f"`{name}`", _cell(type_name), _default(default), _cell(comment or " ".join(above))
            above = []


def _written(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "{}" if isinstance(value, Mapping) else str(value)


def _default(text: str | None) -> str:
    if text is None or text == "field(default_factory=list)":
        return "" if text is None else "`[]`"
    return f"`{text.removeprefix('(').removesuffix(')') if text.startswith('(') and text != '()' else text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
