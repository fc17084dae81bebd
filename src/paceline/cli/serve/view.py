"""What a server shows while its model is loaded, and the card when it is ready: what runs, how much fits, where it is
and how to try it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from paceline.cli.terminal import is_dumb
from paceline.config.model_set import ModelShare
from paceline.process.child import DEVICES, Place
from paceline.process.client import EngineInfo
from paceline.process.frames import StillLoading

TYPICAL_TOKENS = 2048
CLEAR_LINE = "\r\x1b[2K"
BAR_WIDTH = 30
Line = tuple[str, str]


def card_lines(
    info: EngineInfo,
    *,
    version: str,
    names: Sequence[str],
    base_url: str,
    metrics_url: str,
    curl_options: str = "",
    needs_key: bool,
    further: Sequence[Line] = (),
) -> list[Line]:
    """Label and value of each line; `further` ones about models and engines come behind the model's."""
    made = "" if info.quantization == "auto" else f" made {info.quantization}"
    also = f" (also {', '.join(names[1:])})" if len(names) > 1 else ""
    lines = [
        ("paceline", version),
        ("model", names[0] + also),
        *further,
        (
            "runs on",
            f"{info.device}, {info.dtype}, weights {_size(info.weight_bytes)}{made}, loaded in {info.load_s:.1f} s",
        ),
        *_kernels(info),
        *_capacity(info),
        *([("vectors", info.vectors)] if info.vectors else []),
        ("steps", _steps(info)),
        *([("chat", f"{base_url}/")] if info.makes_text else []),
        ("API", f"{base_url}/v1"),
        ("live page", f"{base_url}/ui"),
        ("docs", f"{base_url}/docs"),
        ("metrics", metrics_url),
    ]
    lines += [("note", notice) for notice in info.notices]
    lines.append(("try", curl_line(info, base_url, names[0], curl_options, needs_key=needs_key)))
    return lines


def _capacity(info: EngineInfo) -> list[Line]:
    if not info.makes_text:
        return [("texts", f"of up to {info.max_model_len:,} tokens, at most {info.max_num_seqs:,} at once")]
    tokens = info.usable_blocks * info.block_size
    kind = "" if info.kv_dtype == info.dtype else f" of {info.kv_dtype}"
    blocks = f"{info.usable_blocks:,} blocks x {info.block_size} = {tokens:,} tokens"
    return [
        ("KV cache", f"{_size(info.kv_bytes)}{kind}: {blocks}"),
        ("concurrency", _concurrency(info, tokens)),
    ]


def further_line(name: str, info: EngineInfo, share: ModelShare) -> Line:
    """The line of a model beside the first one."""
    tokens = info.usable_blocks * info.block_size
    return (
        "and",
        f"{name}: weights {_size(info.weight_bytes)}, KV cache of {tokens:,} tokens, share {share.share:g}",
    )


def engines_lines(places: Sequence[Place], elsewhere: str) -> list[Line]:
    """The lines of several engines: what of this machine each has, and where others are."""
    far = [("linked to", f"engines at {elsewhere}")] if elsewhere else []
    return [*([engines_line(places)] if places else []), *far]


def engines_line(places: Sequence[Place]) -> Line:
    """What of this machine each of several engines has."""
    least, most = (choose(len(place.cores) for place in places) for choose in (min, max))
    each = _counted(most, "core") if least == most else f"{least} to {most} cores"
    devices = [place.environment.get(DEVICES, "") for place in places]
    cards = f", GPUs {', '.join(devices)}" if all(devices) else ""
    return ("engines", f"{len(places)} processes, {each} each{cards}; sizes below are of all of them")


def _kernels(info: EngineInfo) -> list[Line]:
    """What computes steps, where that is not the device's own way."""
    if "ranks" in info.runner:
        threads = _counted(int(info.runner["threads"]), "thread")
        return [("ranks", f"{info.runner['ranks']} processes with a part of each layer, {threads} each")]
    if "kernels" not in info.runner:
        return []
    return [("CPU kernels", f"{info.runner['kernels']}, {_counted(int(info.runner['threads']), 'thread')}")]


def curl_line(info: EngineInfo, base_url: str, name: str, options: str, *, needs_key: bool) -> str:
    path = "/v1/chat/completions"
    asked: dict[str, object] = {"messages": [{"role": "user", "content": "Hello!"}]}
    if not info.makes_text:
        path, asked = "/v1/embeddings" if "numbers" in info.vectors else "/classify", {"input": ["Hello!"]}
    body = json.dumps({"model": name, **asked})
    quoted = body.replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $PACELINE_API_KEY"' if needs_key else ""
    return f"curl {options}{base_url}{path} -H 'Content-Type: application/json'{key} -d '{quoted}'"


class LoadingLine:
    """How far loading is: one line that changes on a terminal, a line for each stage elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._changes = stream.isatty() and not is_dumb()
        self._shown = ""

    def show(self, loading: StillLoading | None) -> None:
        """None: loading has ended."""
        with suppress(OSError, ValueError):  # a disk that is full is no reason not to serve
            text = "" if loading is None else _progress(loading, with_bar=self._changes)
            if text == self._shown:
                return
            if self._changes:
                self._stream.write(f"{CLEAR_LINE}{text}")
            elif text:
                self._stream.write(f"{text}\n")
            self._stream.flush()
            self._shown = text


def _progress(loading: StillLoading, *, with_bar: bool) -> str:
    if not loading.stage:
        return ""
    if not loading.total or not with_bar:
        return f"{loading.stage} ..."
    filled = BAR_WIDTH * loading.done // loading.total
    return (
        f"{loading.stage} {'━' * filled}{'╌' * (BAR_WIDTH - filled)} {loading.done} of {loading.total} layers"
    )


def show_card(lines: Sequence[Line], stream: TextIO) -> None:
    """A box on a terminal that has room for it, plain lines elsewhere. The line to copy stays whole."""
    try:
        width = max(len(label) for label, _ in lines)
        if not stream.isatty():
            stream.write("".join(f"{label}: {value}\n" for label, value in lines))
        else:
            stream.write(_boxed(lines, width, shutil.get_terminal_size().columns))
        stream.flush()
    except (OSError, ValueError):
        return  # it is not read


def _boxed(lines: Sequence[Line], width: int, columns: int) -> str:
    framed = [f"{label:<{width}}  {value}" for label, value in lines if label != "try"]
    outside = "".join(f"  {value}\n" for label, value in lines if label == "try")
    inner = max(map(len, framed))
    if inner + 4 > columns:
        return "\n".join(framed) + "\n\n" + outside + "\n"
    top, bottom = "╭" + "─" * (inner + 2) + "╮\n", "╰" + "─" * (inner + 2) + "╯\n"
    return top + "".join(f"│ {line:<{inner}} │\n" for line in framed) + bottom + "\n" + outside + "\n"


def _steps(info: EngineInfo) -> str:
    text = f"at most {info.max_num_batched_tokens:,} tokens each (--max-num-batched-tokens)"
    if info.max_num_prompt_tokens > info.max_num_batched_tokens:
        text += f", {info.max_num_prompt_tokens:,} while no row decodes"
    if info.learns_step_sizes:
        text += "; follows how long steps take"
    return text


def _concurrency(info: EngineInfo, tokens: int) -> str:
    parts = [f"{tokens / info.max_model_len:.2f}x for {info.max_model_len:,} tokens per request"]
    if info.max_model_len > TYPICAL_TOKENS:
        parts.append(f"{tokens / TYPICAL_TOKENS:.2f}x for {TYPICAL_TOKENS:,}")
    return f"{', '.join(parts)}; at most {info.max_num_seqs} at once"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
