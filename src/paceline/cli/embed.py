"""`paceline embed`: a file of texts in, a file of vectors out.

Owns both files. Texts are read and vectors written a window at a time, so that neither has to fit into memory; the
vectors appear under their name when all of them are there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from paceline.cli.command import Command
from paceline.cli.flags import engine_options, find_model, writable
from paceline.config.options import option
from paceline.errors import InputError, InvalidRequest

HELP = """
Write the vectors of a file of texts.

  paceline embed texts.jsonl vectors.npy
  paceline embed articles.jsonl vectors.npy --field body --truncate
  paceline embed asked.jsonl vectors.npy -m org/model --prompt-name query

A line is a text as a JSON string, or an object with the text in a field. Row i of the array (float32, numpy's file
format) is the vector of line i. What is wrong with a text is told with its line, and nothing is written then.
"""
WINDOW = 2048  # texts that are in memory
MOST_LINE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """What `paceline embed` takes beside the model's options."""

    PANEL: ClassVar = "Files"

    source: str = option("", "file with a text on each line", argument=True, metavar="TEXTS")
    target: str = option("", "file that the vectors are written to", argument=True, metavar="VECTORS")
    field: str = option("text", "field of a line that is an object", basic=True, metavar="NAME")
    truncate: bool = option(False, "cut texts that are too long instead of refusing them", basic=True)
    prompt_name: str | None = option(
        None,
        "prompt of the model that is put before each text",
        basic=True,
        metavar="NAME",
        default_text="the model's",
    )
    dimensions: int | None = option(
        None, "only the first numbers of each vector", low=1, basic=True, default_text="all"
    )


def _embed(values: Mapping[str, Any]) -> None:
    engine = {"model": "minilm", **engine_options(values)}
    if not values["source"] or not values["target"]:
        raise InputError("give two files, as in: paceline embed texts.jsonl vectors.npy")
    source, target = Path(values["source"]), writable("VECTORS", values["target"])
    assert target is not None
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError("the vectors would be written over the texts; give another file")
    # What is wrong is told before a model is loaded.
    count = sum(1 for _ in read_texts(source, values["field"]))
    if not count:
        raise InputError(f"{source} has no texts")
    find_model(engine)

    from paceline.llm.llm import LLM

    with LLM(**engine) as llm:
        started_s = time.monotonic()
        tokens = _write(llm, source, target, count, values)
        took_s = time.monotonic() - started_s
    print(
        f"{count:,} vectors in {took_s:.1f} s: {count / took_s:,.0f} texts/s, {tokens / took_s:,.0f} tokens/s",
        file=sys.stderr,
    )


def read_texts(source: Path, field: str) -> Iterator[str]:
    """The text of each line. Raises InputError with the number of a line that has none."""
    try:
        with source.open("rb") as lines:
            for number in range(1, sys.maxsize):
                line = lines.readline(MOST_LINE_BYTES + 1)
                if not line:
                    return
                yield _text(line, field, f"{source}, line {number}")
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error


def _text(line: bytes, field: str, where: str) -> str:
    if len(line) > MOST_LINE_BYTES:
        raise InputError(f"{where} is longer than {MOST_LINE_BYTES >> 20} MiB")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: give a string or an object on each line") from error
    text = value.get(field) if isinstance(value, dict) else value
    if not isinstance(text, str):
        what = (
            f"has no text in {field!r:.40}"
            if isinstance(value, dict)
            else "is neither a string nor an object"
        )
        raise InputError(f"{where} {what}")
    if not text:
        raise InputError(f"{where} is empty, and an empty text has no vector")
    return text


def _write(llm: Any, source: Path, target: Path, count: int, values: Mapping[str, Any]) -> int:
    """Returns how many tokens the texts had."""
    import numpy as np
    from tqdm import tqdm

    asked = {name: values[name] for name in ("dimensions", "prompt_name", "truncate")}
    part, tokens, array = target.with_name(f".{target.name}.{os.getpid()}"), 0, None
    texts = read_texts(source, values["field"])
    try:
        with tqdm(total=count, unit="text", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
            for first in range(0, count, WINDOW):
                window = list(islice(texts, WINDOW))
                try:
                    outputs = llm.embed(window, use_tqdm=False, **asked)
                except InvalidRequest as error:
                    raise InputError(_by_line(str(error), source, first)) from error
                if array is None:
                    width = len(outputs[0].outputs.data)
                    array = np.lib.format.open_memmap(part, "w+", np.float32, (count, width))
                for place, output in enumerate(outputs, first):
                    array[place] = output.outputs.data
                    tokens += len(output.prompt_token_ids)
                array.flush()
                bar.update(len(window))
        os.replace(part, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()
    return tokens


def _by_line(message: str, source: Path, first: int) -> str:
    """`input 7: ...` of a window that begins behind `first` lines."""
    place, _, rest = message.removeprefix("input ").partition(": ")
    return f"{source}, line {first + int(place) + 1}: {rest}" if place.isdecimal() else message


EMBED = Command(
    name="embed",
    help=HELP,
    run=_embed,
    takes=(EmbedOptions, "Model", "Step size"),
    defaults={"model": "minilm"},
)
