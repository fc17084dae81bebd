"""How `paceline top` looks: figures, bars and lanes as text that fits its terminal, from sixty columns on.

A function of the picture and the size of the terminal. What a narrow terminal has no room for goes to a further line
where it matters, such as latencies, and is left out where it does not. What comes from a server (names of models and
tenants) is shown as text and never as control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.cli.terminal import shown
from paceline.cli.top.picture import (
    DECODE,
    PREFILL,
    RECOMPUTE,
    SWAP,
    WINDOW_S,
    DrawnLane,
    ServerPicture,
    ShownFigures,
)

LEAST_WIDTH = 60
WIDE = 100  # columns, from which there is room for large numbers of blocks before the bars
CELLS = {
    PREFILL: ("▒", "yellow"),
    DECODE: ("█", "green"),
    RECOMPUTE: ("x", "bold red"),
    SWAP: ("s", "bold magenta"),
}
LABEL = 8  # characters before the figures of a line
LEAST_BAR, MOST_BAR = 6, 40
SHOWN_TENANTS = 4
GONE = ("lost", "stuck", "stopped")
DIM, BOLD = "dim", "bold"


def frame(picture: ServerPicture, state: str, address: str, width: int, height: int) -> RenderableType:
    """One screen. `state` says how the connection is."""
    width = max(width, LEAST_WIDTH)
    lines = [_title(picture, state, address, width)]
    if not picture.num_messages:
        lines += _engine_lines(picture, width)
        return Group(*lines, Text(picture.unavailable or "nothing received yet", style=DIM))
    figures = picture.figures()
    lines += _engine_lines(picture, width)
    lines += _model_lines(figures, width)
    lines += _load_lines(figures, width)
    lines += _adapter_lines(figures, width)
    lines += _latency_lines(figures, width)
    lines += _step_lines(figures, width)
    lines += _tenant_lines(figures, width)
    if picture.unavailable:
        lines.append(Text(f"the engine: {shown(picture.unavailable)}", style="red"))
    waiting = _waiting_line(picture, figures, width)
    room = height - len(lines) - len(waiting) - 1
    lines += _lane_lines(picture, width, max(3, room))
    lines += waiting
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _title(picture: ServerPicture, state: str, address: str, width: int) -> Text:
    engine = picture.about.get("engine", {})
    number = picture.about.get("number")
    shown_one = "" if number is None else f"engine {number}"
    what = [picture.about.get("model", ""), shown_one, engine.get("device", ""), engine.get("dtype", "")]
    left = " · ".join(["paceline", *(shown(str(part)) for part in what if part)])
    right = state if state != "live" else address
    text = Text(left, style=BOLD)
    text.truncate(max(1, width - len(right) - 2), overflow="ellipsis")
    text.append(" " * max(1, width - len(text) - len(right)))
    text.append(right[: width - 1], style="green" if state == "live" else "bold red")
    return text


def _load_lines(figures: ShownFigures, width: int) -> list[Text]:
    rows, blocks = figures.rows or max(1, figures.running), figures.blocks
    total = max(1, sum(blocks.values()))
    held = blocks["held"] + blocks["shared"]
    running = _line("rows", f"{figures.running} of {figures.rows}", width)
    rates = [
        Text(f"  waiting {figures.waiting:,}  out {figures.output_per_s:,.0f} tok/s"),
        Text(f"  in {figures.prompt_per_s:,.0f} tok/s", style=DIM),
    ]
    memory = _line("blocks", f"{held:,} of {total:,}", width)
    hits = "–" if figures.hit_share is None else f"{figures.hit_share:.0%}"
    uses = [
        Text(f"  hits {hits}"),
        Text(f"  cached {blocks['cached']:,}"),
        Text(f"  shared {blocks['shared']:,}"),
    ]
    parts = [
        (blocks["shared"] / total, "█", "cyan"),
        (blocks["held"] / total, "█", "green"),
        (blocks["cached"] / total, "░", "green"),
    ]
    return [
        _barred(running, [(figures.running / rows, "█", "green")], rates, width),
        _barred(memory, parts, uses, width),
        *(_level_line(name, level, width) for name, level in figures.below.items()),
    ]


def _level_line(name: str, level: Mapping[str, int], width: int) -> Text:
    """A level below the device."""
    cached, places = level["cached"], level["places"]
    parts = [(level["held"] / places, "█", "green"), (cached / places, "░", "green")]
    moves = [
        *([Text("  off", style="bold red")] if level["is_off"] else []),
        Text(f"  hit {level['hits']:,} tok"),
        Text(f"  stored {level['stored']:,}"),
        Text(f"  loaded {level['loaded']:,}"),
        Text(f"  failed {level['failed']:,}" if level["failed"] else "", style="red"),
    ]
    return _barred(_line(name, f"{cached:,} of {places:,}", width), parts, moves, width)


def _engine_lines(picture: ServerPicture, width: int) -> list[Text]:
    """One for each engine of several, and the newest failover."""
    lines = []
    for engine in picture.engines():
        state, rows, restarts = engine["state"], engine["rows"], engine["restarts"]
        words = [
            Text(f"  {state}", style="" if state == "ready" else "bold red" if state in GONE else "yellow"),
            Text(f"  {engine['running']:,} of {rows:,} rows"),
            Text(f"  {engine['waiting']:,} wait"),
            Text(f"  {engine['output_per_s']:,.0f} tok/s"),
            Text(f"  KV {engine['kv_usage']:.0%}"),
            Text(f"  restarts {restarts}" if restarts else "", style=DIM),
        ]
        head = _line("engine", str(engine["number"]), width)
        lines.append(_barred(head, [(engine["running"] / max(1, rows), "█", "green")], words, width))
    for age_s, source, target, requests, _ in picture.passages[-1:]:
        line = _line("", "", width)
        line.append(f"{age_s:.0f} s ago: {requests:,} requests went on from engine {source} to {target}")
        lines.append(line)
    return lines


def _model_lines(figures: ShownFigures, width: int) -> list[Text]:
    """One for each model of several: its part of the device's time lately, and its share."""
    total = sum(model["share"] for model in figures.models)
    lines = []
    for model in figures.models:
        part, (kv, weights, adapters, slabs) = model["part"], model["slabs"]
        uses = f"{kv:,}+{weights:,}" + (f"+{adapters:,}" if adapters else "")
        head = _line("model", shown(model["name"])[:13], width)
        words = [
            Text(f"  {model['standing']}", style="" if model["standing"] == "awake" else "yellow"),
            Text(f"  {'idle' if part is None else f'{part:.0%}'} of {model['share'] / total:.0%}"),
            Text(f"  {model['device_s']:,.1f} s"),
            Text(f"  {model['running']:,} run {model['waiting']:,} wait"),
            Text(f"  {uses} of {slabs:,} slabs" if slabs else ""),
        ]
        lines.append(_barred(head, [(part or 0.0, "█", "green")], words, width))
    return lines


def _adapter_lines(figures: ShownFigures, width: int) -> list[Text]:
    adapters = figures.adapters
    if not adapters:
        return []
    line = _line("adapter", f"{adapters['resident']:,} of {adapters['known']:,}", width)
    parts: list[Text] = []
    for what in ("running", "waiting"):
        names = [f"{shown(name)[:16]} " for name in adapters[what]]
        more = adapters[f"num_{what}"] - len(names)
        words = [*names, f"and {more:,} more "] if more > 0 else names
        parts += [
            Text.assemble((f"{what} " if not place else "", DIM), word) for place, word in enumerate(words)
        ]
    read = f"read again {adapters['read']:,}  evicted {adapters['evicted']:,}"
    return _wrapped(line, [*parts, Text(read, style=DIM)], width)


def _latency_lines(figures: ShownFigures, width: int) -> list[Text]:
    parts = []
    for name, label in {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}.items():
        found = figures.latencies_ms[name]
        times = "/".join(_milliseconds(found[share]) for share in ("p50", "p90", "p99"))
        parts.append(Text.assemble((f"{label} ", DIM), times, "   "))
    parts[-1].append("ms, p50/90/99", style=DIM)  # never on a line without figures
    return _wrapped(Text(f"{'latency':<{LABEL}}", style=DIM), parts, width)


def _step_lines(figures: ShownFigures, width: int) -> list[Text]:
    line = _line("steps", f"{figures.steps_per_s:,.1f}/s", width)
    if figures.decode_tokens is None or figures.prefill_tokens is None or not figures.budget:
        line.append("none lately", style=DIM)
        return [line, _ends(figures, width)]
    budget = max(figures.budget, figures.decode_tokens + figures.prefill_tokens)
    decode, prefill = figures.decode_tokens, figures.prefill_tokens
    padding = figures.padding or 0.0
    took = "" if figures.step_ms is None else f"{figures.step_ms:,.1f} ms: "
    wasted = f" ({padding:,.0f} pad)" if padding >= 0.5 else ""
    details = [
        Text(f"  {took}{decode:,.0f} decode + {prefill:,.0f} prefill"),
        Text(f" of {budget:,.0f}"),
        Text(wasted),
    ]
    parts = [(decode / budget, "█", "green"), (prefill / budget, "▒", "yellow")]
    return [_barred(line, parts, details, width), _ends(figures, width)]


def _ends(figures: ShownFigures, width: int) -> Text:
    line = _line("total", f"step {figures.step:,}", width)
    details = [
        Text(f"finished {figures.finished:,}"),
        *(
            [Text(f"   vectors {figures.vectors:,} ({figures.vectors_per_s:,.1f}/s)")]
            if figures.vectors
            else []
        ),
        *(
            [
                Text(f"   pictures {figures.encoded:,} ({figures.encoded_per_s:,.1f}/s)"),
                Text(f" in {figures.pages['held']:,} of {figures.pages['pages']:,} pages", style=DIM),
            ]
            if figures.pages["pages"]
            else []
        ),
        Text(f"   preempted {figures.preempted:,}"),
        Text(f" ({figures.swapped:,} swapped)", style=DIM),
    ]
    return line.append_text(_first_that_fit(details, width - line.cell_len))


def _tenant_lines(figures: ShownFigures, width: int) -> list[Text]:
    """Those with the most rows; a count stands for the others."""
    if len(figures.tenants) < 2:
        return []
    line = Text(f"{'tenants':<{LABEL}}", style=DIM)
    total, left = max(1, figures.running), len(figures.tenants)
    for name, (rows, waits) in islice(figures.tenants.items(), SHOWN_TENANTS):
        share = f"{rows / total:.0%}{f' +{waits:,}' if waits else ''}   "
        part = Text.assemble((f"{shown(name)[:16]} ", BOLD), share)
        rest = f"and {left - 1} more" if left > 1 else ""
        if line.cell_len + part.cell_len + len(rest) > width and left < len(figures.tenants):
            break
        line.append_text(part)
        left -= 1
    if left:
        line.append(f"and {left} more", style=DIM)
    return [line]


def _lane_lines(picture: ServerPicture, width: int, room: int) -> list[Text]:
    strip = min(width - 28, int(WINDOW_S / 0.5))
    head = Text(f"{'row':>4} {'request':>9} {'tokens':>11}  ", style=DIM)
    names = {PREFILL: "prefill", DECODE: "decode", RECOMPUTE: "recompute", SWAP: "swap"}
    signs = [
        Text.assemble((f"{CELLS[what][0]} ", CELLS[what][1]), (f"{name} ", DIM))
        for what, name in names.items()
    ]
    legend = _wrapped(head, signs, width)
    lanes = sorted(picture.lanes.items())
    # Rows in use come first where there is no room for all.
    chosen = sorted(lanes, key=lambda each: each[1].request is None)
    chosen = chosen[: max(1, room - len(legend) - 1)]
    lines = [
        *legend,
        *(_lane(row, lane, picture, strip) for row, lane in sorted(chosen, key=lambda each: each[0])),
    ]
    if len(lanes) > len(chosen):
        lines.append(Text(f"     and {len(lanes) - len(chosen)} more rows", style=DIM))
    return lines


def _lane(row: int, lane: DrawnLane, picture: ServerPicture, strip: int) -> Text:
    if lane.request is None:
        text = Text(f"{row:>4} {'':>9} {'':>11}  ", style=DIM)
    else:
        tokens = f"{_short(lane.num_tokens)}/{_short(lane.limit)}"
        text = Text(f"{row:>4} {lane.request:>9} {tokens:>11}  ")
    now = picture.cell(picture.now_s)
    for number in range(now - strip + 1, now + 1):
        sign, style = CELLS.get(lane.cells.get(number, ""), (" ", ""))
        text.append(sign, style=style)
    return text


def _waiting_line(picture: ServerPicture, figures: ShownFigures, width: int) -> list[Text]:
    if not picture.waiting:
        return []
    line = Text(f"{'queue':<{LABEL}}", style=DIM)
    for request, arrival_s, *_ in picture.waiting:
        part = f"{request} ({max(0.0, picture.now_s - arrival_s):.1f} s)  "
        if len(line) + len(part) > width - 12:
            break
        line.append(part)
    line.append(f"{figures.waiting:,} wait", style=DIM)
    return [line]


def _line(label: str, value: str, width: int) -> Text:
    """A label and the value it is about, at least a blank before what follows."""
    column = 18 if width >= WIDE else 14
    return Text.assemble((f"{label:<{LABEL}}", DIM), (f"{value:<{column - 1}} ", BOLD))


def _wrapped(head: Text, parts: Sequence[Text], width: int) -> list[Text]:
    """A line and as many more, set in as far as its head, as the parts need; none of them is broken."""
    lines, indent = [head], head.cell_len
    for part in parts:
        if lines[-1].cell_len > indent and lines[-1].cell_len + len(part.plain.rstrip()) > width:
            lines.append(Text(" " * indent))
        lines[-1].append_text(part)
    for line in lines:
        line.rstrip()
    return lines


def _first_that_fit(parts: Sequence[Text], room: int) -> Text:
    """The parts as far as there is room; the first stays in any case."""
    text = parts[0].copy()
    for part in parts[1:]:
        if text.cell_len + part.cell_len > room:
            break
        text.append_text(part)
    return text


def _barred(
    head: Text, shares: Sequence[tuple[float, str, str]], details: Sequence[Text], width: int
) -> Text:
    """A line with a bar and details behind it, of which the last parts go first where there is no room.

    All bars of a screen are equally long; one goes too where the first detail needs its place.
    """
    room = width - head.cell_len
    bar_width = max(LEAST_BAR, min(MOST_BAR, width - 68))
    if bar_width + details[0].cell_len > room:
        return head.append_text(_first_that_fit(details, room))
    head.append_text(_bar(shares, bar_width))
    return head.append_text(_first_that_fit(details, room - bar_width))


def _bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """A bar whose parts are shares of its width; the rest is dots."""
    text, filled, upto = Text(), 0, 0.0
    for share, sign, style in parts:
        upto += share
        end = max(filled, min(width, round(upto * width)))
        if share > 0 and end == filled and end < width and sum(each[0] for each in parts) > 0:
            end += 1  # what is there is seen
        text.append(sign * (end - filled), style=style)
        filled = end
    text.append("·" * (width - filled), style=DIM)
    return text


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _short(number: int) -> str:
    return f"{number / 1000:.0f}k" if number >= 10_000 else str(number)


def lane_values(lanes: Mapping[int, DrawnLane]) -> list[dict[str, object]]:
    """Rows in use, for the JSON output."""
    return [
        {
            "row": row,
            "request": lane.request,
            "num_tokens": lane.num_tokens,
            "limit": lane.limit,
            "tenant": lane.tenant,
        }
        for row, lane in sorted(lanes.items())
        if lane.request is not None
    ]
