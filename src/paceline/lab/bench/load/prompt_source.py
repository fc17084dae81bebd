"""The requests of a run, made one at a time by their number.

Owns how lengths become prompts. A prompt is made of common short words, each of which is one token in the vocabularies
of today's models, so that no tokenizer is needed and no two requests share more than they should; what the server
counted is what the results say. Request n is the same whenever it is made: numbers below zero are for warming up.
"""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from paceline.errors import InputError
from paceline.lab.workload.traces import CSV_FORMATS, read_text, shown
from paceline.lab.workload.workload import OBJECTIVES, Workload

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city community name "
    "president team minute idea body information back parent face others level office door health person "
    "art war history party result change morning reason research girl guy moment air teacher force "
    "education foot boy age policy music market sense nation plan college interest death experience "
    "effect use class control care field development role effort rate heart drug show leader light voice "
    "wife police mind price report decision son view relationship town road arm difference value building "
    "action season society tax director position player record paper space ground form event official "
    "matter center couple site project star table need court oil situation cost industry figure street "
    "image phone data picture practice piece land product doctor wall patient worker news test movie "
    "north love support technology step baby computer type attention film tree source organization hair "
    "look window culture chance brother energy period course summer plant opportunity term letter "
    "condition choice rule daughter south husband floor campaign material population call economy "
    "hospital church risk fire future bank help staff sound blue red green black white small large long "
    "short old new high low good great "
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request, before it is put into the form of an API."""

    prompt: str | Sequence[Mapping[str, Any]]  # text, or the messages of a conversation
    num_output: int | None = None  # None: the server's own limit
    tenant: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)  # more of the body
    images: tuple[str, ...] = ()  # as data: links, before a prompt of text


class Source(Protocol):
    """Where requests come from."""

    @property
    def name(self) -> str: ...

    def make(self, index: int) -> LoadRequest: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSource:
    """Made-up prompts. Lengths are drawn evenly around a mean; a share of each prompt may be common to many."""

    seed: int = 0
    input_len: int = 256
    output_len: int = 128
    spread: float = 0.0  # 0.5: from half to one and a half times the mean
    prefix_share: float = 0.0
    num_prefixes: int = 1

    @property
    def name(self) -> str:
        return f"random {self.input_len}x{self.output_len}"

    def make(self, index: int) -> LoadRequest:
        draw = random.Random(f"{self.seed} {index}")
        num_input, num_output = self._length(draw, self.input_len), self._length(draw, self.output_len)
        num_shared = round(num_input * self.prefix_share) if index >= 0 else 0
        shared = words(f"{self.seed} prefix {index % self.num_prefixes}", num_shared)
        own = draw.choices(WORDS, k=num_input - num_shared)
        return LoadRequest(prompt=" ".join([*shared, *own]), num_output=num_output)

    def _length(self, draw: random.Random, mean: int) -> int:
        return max(1, draw.randint(round(mean * (1 - self.spread)), round(mean * (1 + self.spread))))


class TraceSource:
    """Lengths, tenants, shared blocks and objectives as a workload has them; after its end it begins again."""

    def __init__(self, workload: Workload, *, seed: int) -> None:
        self.name = workload.name
        self.workload = workload
        self._seed = seed

    def make(self, index: int) -> LoadRequest:
        work = self.workload
        row = index % len(work)
        num_input = int(work.prompt_len[row])
        own = f"{self._seed} {index}"
        if work.prefix_ids is None or index < 0:
            prompt = words(own, num_input)
        else:
            prompt = self._blocks(work.prefix_ids[row], num_input)
        objectives = [0] * len(OBJECTIVES) if work.objectives is None else work.objectives[row].tolist()
        return LoadRequest(
            prompt=" ".join(prompt),
            num_output=int(work.output_len[row]),
            tenant=work.tenants[int(work.tenant[row])] if len(work.tenants) > 1 else "",
            fields={
                name: objective for name, objective in zip(OBJECTIVES, objectives, strict=True) if objective
            },
        )

    def _blocks(self, ids: Sequence[int], num_input: int) -> list[str]:
        """Blocks with the same id have the same words, whichever request they are in."""
        found: list[str] = []
        for block in ids:
            found += words(f"{self._seed} block {block}", self.workload.prefix_block)
        return found[:num_input]


class TextSource:
    """Prompts from a file, over and over."""

    def __init__(self, name: str, requests: Sequence[LoadRequest]) -> None:
        assert requests
        self.name = name
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def make(self, index: int) -> LoadRequest:
        return self._requests[index % len(self._requests)]


# Pictures that are made up: PNG files of coloured squares, which are as large for a model as photographs, and small to
# send. No library is needed for them.


COMMON_IMAGES = 8  # that are sent again and again, where some are
SQUARE = 16  # pixels a side
MAX_SIDE = 16_384


class PicturedSource:
    """The requests of another source, with pictures before their text."""

    def __init__(self, source: Source, *, count: int, size: tuple[int, int], reuse: float, seed: int) -> None:
        self.name = f"{source.name}, {count} pictures of {size[0]}x{size[1]}"
        self.source = source
        self._count, self._size, self._reuse, self._seed = count, size, reuse, seed
        self._common: dict[int, str] = {}  # those that are sent again

    def make(self, index: int) -> LoadRequest:
        request = self.source.make(index)
        if not isinstance(request.prompt, str):
            raise InputError("--images stand before prompts of text; this file holds conversations")
        draw = random.Random(f"{self._seed} {index} pictures")
        images = tuple(self._image(draw, f"{index} {number}") for number in range(self._count))
        return replace(request, images=images)

    def _image(self, draw: random.Random, name: str) -> str:
        if draw.random() >= self._reuse:
            return self._link(name)
        common = draw.randrange(COMMON_IMAGES)
        if common not in self._common:
            self._common[common] = self._link(f"common {common}")
        return self._common[common]

    def _link(self, name: str) -> str:
        content = png(*self._size, seed=f"{self._seed} {name}")
        return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int, *, seed: str) -> bytes:
    """A picture of squares whose colours follow from the seed."""
    draw, rows = random.Random(seed), bytearray()
    for top in range(0, height, SQUARE):
        colours = (draw.randbytes(3) * SQUARE for _ in range(0, width, SQUARE))
        line = b"\0" + b"".join(colours)[: 3 * width]  # the byte before it: not filtered
        rows += line * min(SQUARE, height - top)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(rows), 1)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def parse_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if width.isdecimal() and height.isdecimal() and len(text) < 12:
        size = int(width), int(height)
        if all(1 <= side <= MAX_SIDE for side in size):
            return size
    raise InputError(f"--image-size '{text}' is not understood; give WxH in pixels, such as 512x512")


def words(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count) if count else []


# Requests in the form of an API: the JSON of chat completions and completions.
#
# Fields beyond OpenAI's are sent only where they were given, so that any server takes the rest.


CHAT, COMPLETIONS = "chat", "completions"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
BACKENDS = {CHAT: "openai-chat", COMPLETIONS: "openai"}  # as other tools call them


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyForm:
    """What all requests of a run have in common."""

    api: str  # chat or completions
    model: str
    ignore_eos: bool
    temperature: float | None = None  # None: the server's own
    output_len: int | None = None  # instead of a request's own
    more: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, request: LoadRequest) -> bytes:
        body: dict[str, Any] = {"model": self.model, **self._prompt(request)}
        num_output = self.output_len or request.num_output
        if num_output is not None:
            body["max_tokens"] = num_output
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature is not None:
            body["temperature"] = self.temperature
        body |= {"stream": True, "stream_options": {"include_usage": True}, **request.fields, **self.more}
        return msgspec.json.encode(body)

    def _prompt(self, request: LoadRequest) -> dict[str, Any]:
        prompt = request.prompt
        if self.api == CHAT:
            if request.images:
                parts: list[Any] = [
                    {"type": "image_url", "image_url": {"url": each}} for each in request.images
                ]
                return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]}
            return {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}
        if not isinstance(prompt, str):
            prompt = "\n".join(str(message.get("content", "")) for message in prompt)
        return {"prompt": prompt}


# Files with prompts: plain text, JSON lines, ShareGPT conversations.
#
# Owns how such a file differs from a trace and what its entries mean. Every mistake in one is an `InputError` that
# names the place.


CHARACTERS_PER_TOKEN = 4  # for the length of a recorded answer, where no tokenizer says better
FORMS = (
    'plain text (a prompt a line), JSON lines with "prompt", "messages", "question" or "turns" (optionally '
    '"max_tokens", "tenant"), ShareGPT JSON'
)


def is_trace(path: Path) -> bool:
    """Whether the file holds lengths and times rather than prompts."""
    text = read_text(path)
    first = text.lstrip().partition("\n")[0]
    if first.startswith("{"):
        return '"timestamp"' in first and '"prompt"' not in first and '"messages"' not in first
    columns = {name.strip().casefold() for name in first.split(",")}
    return path.suffix.lower() == ".csv" or any(
        columns.issuperset(name.casefold() for name in layout.required) for layout in CSV_FORMATS
    )


def read_prompts(path: Path) -> list[LoadRequest]:
    """The prompts of a file, in its order."""
    text = read_text(path)
    start = text.lstrip()[:1]
    if start == "[":
        found = list(_share_gpt(path, text))
    elif start == "{":
        found = [_entry(path, line, content) for line, content in _lines(text)]
    else:
        found = [LoadRequest(prompt=content.strip()) for _, content in _lines(text)]
    if not found:
        raise InputError(f"{path}: has no prompts; it may hold {FORMS}")
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield number, content


def _entry(path: Path, line: int, content: str) -> LoadRequest:
    try:
        entry = json.loads(content)
    except ValueError as error:
        raise InputError(f"{path}:{line}: is not valid JSON ({error})") from None
    if isinstance(entry, dict) and isinstance(entry.get("body"), dict):  # a line of an OpenAI batch
        entry = entry["body"]
    if not isinstance(entry, dict):
        raise InputError(f"{path}:{line}: is not a JSON object: {shown(entry)}")
    if "conversations" in entry:
        return _conversation(f"{path}:{line}", entry)
    prompt = _prompt(entry)
    is_text = isinstance(prompt, str) and prompt
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(part, dict) for part in prompt)
    if not (is_text or is_chat):
        raise InputError(
            f'{path}:{line}: needs "prompt" (text) or "messages" (a list); a file may hold {FORMS}'
        )
    return LoadRequest(
        prompt=prompt,
        num_output=_tokens(f"{path}:{line}", entry),
        tenant=str(entry.get("tenant") or ""),
    )


def _prompt(entry: Mapping[str, Any]) -> Any:
    """Where files of prompts keep them; of several turns the first is asked."""
    turns = entry.get("turns")
    if isinstance(turns, list) and turns:
        return turns[0].get("content") if isinstance(turns[0], dict) else turns[0]
    return next((entry[name] for name in ("prompt", "messages", "question") if name in entry), None)


def _tokens(place: str, entry: Mapping[str, Any]) -> int | None:
    wanted = entry.get("max_tokens", entry.get("max_completion_tokens"))
    if wanted is None:
        return None
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise InputError(f'{place}: "max_tokens" is {shown(wanted)}; it must be a whole number of at least 1')
    return wanted


def _share_gpt(path: Path, text: str) -> Iterator[LoadRequest]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error})") from None
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("conversations"), list):
            raise InputError(f"{path}: entry {number} has no conversations, as ShareGPT files do")
        if len(entry["conversations"]) >= 2:  # some hold half a conversation
            yield _conversation(f"{path}: entry {number}", entry)


def _conversation(place: str, entry: Mapping[str, Any]) -> LoadRequest:
    """The first turn is asked; the answer is at most about as long as the recorded one."""
    turns = entry["conversations"]
    values: list[Any] = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
    if len(values) < 2 or not all(isinstance(value, str) for value in values):
        raise InputError(f"{place}: needs two turns with a value each")
    return LoadRequest(prompt=values[0], num_output=max(1, len(values[1]) // CHARACTERS_PER_TOKEN))
