"""How `paceline top` looks: figures, bars and lanes as text that fits a terminal of eighty columns.

A function of the picture and the size of the terminal. What comes from a server (names of models and tenants) is shown
as text and never as control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.cli.terminal import shown
from paceline.cli.top_picture import DECODE, PREFILL, RECOMPUTE, SWAP, WINDOW_S, Figures, Lane, Picture

LEAST_WIDTH = 60
CELLS = {
    PREFILL: ("▒", "yellow"),
    DECODE: ("█", "green"),
    RECOMPUTE: ("x", "bold red"),
    SWAP: ("s", "bold magenta"),
}
LABEL = 8  # characters before the figures of a line
SHOWN_TENANTS = 4
DIM, BOLD = "dim", "bold"


def frame(picture: Picture, state: str, address: str, width: int, height: int) -> RenderableType:
    """One screen. `state` says how the connection is."""
    width = max(width, LEAST_WIDTH)
    lines = [_title(picture, state, address, width)]
    if not picture.num_messages:
        return Group(*lines, Text(picture.unavailable or "nothing heard yet", style=DIM))
    figures = picture.figures()
    lines += _load_lines(figures, width)
    lines += _latency_lines(figures)
    lines += _step_lines(figures, width)
    lines += _tenant_lines(figures)
    if picture.unavailable:
        lines.append(Text(f"the engine: {shown(picture.unavailable)}", style="red"))
    waiting = _waiting_line(picture, figures, width)
    room = height - len(lines) - len(waiting) - 1
    lines += _lane_lines(picture, width, max(3, room))
    lines += waiting
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines)


def _title(picture: Picture, state: str, address: str, width: int) -> Text:
    engine = picture.about.get("engine", {})
    what = [picture.about.get("model", ""), engine.get("device", ""), engine.get("dtype", "")]
    left = " · ".join(["paceline", *(shown(str(part)) for part in what if part)])
    right = state if state != "live" else address
    text = Text(left[: max(0, width - len(right) - 2)], style=BOLD)
    text.append(" " * max(1, width - len(text) - len(right)))
    text.append(right[: width - 1], style="green" if state == "live" else "bold red")
    return text


def _load_lines(figures: Figures, width: int) -> list[Text]:
    bar_width = _bar_width(width)
    rows, blocks = figures.rows or max(1, figures.running), figures.blocks
    total = max(1, sum(blocks.values()))
    held = blocks["held"] + blocks["shared"]
    running = _line("rows", f"{figures.running} of {figures.rows}", 14)
    running.append_text(_bar([(figures.running / rows, "█", "green")], bar_width))
    running.append(f"  waiting {figures.waiting:,}  out {figures.output_per_s:,.0f} tok/s")
    running.append(f"  in {figures.prompt_per_s:,.0f} tok/s", style=DIM)
    memory = _line("blocks", f"{held:,} of {total:,}", 14)
    parts = [(blocks["shared"] / total, "█", "cyan"), (blocks["held"] / total, "█", "green")]
    memory.append_text(_bar([*parts, (blocks["cached"] / total, "░", "green")], bar_width))
    hits = "–" if figures.hit_share is None else f"{figures.hit_share:.0%}"
    memory.append(f"  shared {blocks['shared']:,}  cached {blocks['cached']:,}  hits {hits}")
    return [running, memory]


def _latency_lines(figures: Figures) -> list[Text]:
    names = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}
    line = _line("latency", "", 0)
    for name, label in names.items():
        found = figures.latencies_ms[name]
        line.append(f"{label} ", style=DIM)
        line.append("/".join(_milliseconds(found[share]) for share in ("p50", "p90", "p99")))
        line.append("   ")
    line.append("ms, p50/90/99", style=DIM)
    return [line]


def _step_lines(figures: Figures, width: int) -> list[Text]:
    line = _line("steps", f"{figures.steps_per_s:,.1f}/s", 14)
    if figures.decode_tokens is None or figures.prefill_tokens is None or not figures.budget:
        line.append("none lately", style=DIM)
        return [line, _ends(figures)]
    budget = max(figures.budget, figures.decode_tokens + figures.prefill_tokens)
    decode, prefill = figures.decode_tokens, figures.prefill_tokens
    padding = figures.padding or 0.0
    parts = [(decode / budget, "█", "green"), (prefill / budget, "▒", "yellow")]
    line.append_text(_bar(parts, _bar_width(width)))
    took = "" if figures.step_ms is None else f"{figures.step_ms:,.1f} ms: "
    wasted = f" ({padding:,.0f} pad)" if padding >= 0.5 else ""
    line.append(f"  {took}{decode:,.0f} decode + {prefill:,.0f} prefill{wasted} of {budget:,.0f}")
    return [line, _ends(figures)]


def _ends(figures: Figures) -> Text:
    line = _line("total", f"step {figures.step:,}", 14)
    line.append(f"finished {figures.finished:,}   gave way {figures.preempted:,}")
    line.append(f" ({figures.swapped:,} swapped)", style=DIM)
    return line


def _tenant_lines(figures: Figures) -> list[Text]:
    if len(figures.tenants) < 2:
        return []
    line = _line("tenants", "", 0)
    total = max(1, figures.running)
    for name, (rows, waits) in islice(figures.tenants.items(), SHOWN_TENANTS):
        line.append(f"{shown(name)[:16]} ", style=BOLD)
        line.append(f"{rows / total:.0%}{f' +{waits}' if waits else ''}   ")
    if len(figures.tenants) > SHOWN_TENANTS:
        line.append(f"and {len(figures.tenants) - SHOWN_TENANTS} more", style=DIM)
    return [line]


def _lane_lines(picture: Picture, width: int, room: int) -> list[Text]:
    strip = min(width - 28, int(WINDOW_S / 0.5))
    legend = Text(f"{'row':>4} {'request':>9} {'tokens':>11}  ", style=DIM)
    for what, name in ((PREFILL, "prefill"), (DECODE, "decode"), (RECOMPUTE, "recompute"), (SWAP, "swap")):
        sign, style = CELLS[what]
        legend.append(f"{sign} ", style=style)
        legend.append(f"{name} ", style=DIM)
    lanes = sorted(picture.lanes.items())
    # Rows in use come first where there is no room for all.
    chosen = sorted(lanes, key=lambda each: each[1].request is None)[: max(1, room - 2)]
    lines = [
        legend,
        *(_lane(row, lane, picture, strip) for row, lane in sorted(chosen, key=lambda each: each[0])),
    ]
    if len(lanes) > len(chosen):
        lines.append(Text(f"     and {len(lanes) - len(chosen)} more rows", style=DIM))
    return lines


def _lane(row: int, lane: Lane, picture: Picture, strip: int) -> Text:
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


def _waiting_line(picture: Picture, figures: Figures, width: int) -> list[Text]:
    if not picture.waiting:
        return []
    line = _line("queue", "", 0)
    for request, arrival_s, *_ in picture.waiting:
        part = f"{request} ({max(0.0, picture.now_s - arrival_s):.1f} s)  "
        if len(line) + len(part) > width - 12:
            break
        line.append(part)
    line.append(f"{figures.waiting:,} wait", style=DIM)
    return [line]


def _line(label: str, value: str, width: int) -> Text:
    text = Text(f"{label:<{LABEL}}")
    text.stylize(DIM)
    text.append(f"{value:<{width}}" if width else value, style=BOLD)
    return text


def _bar_width(width: int) -> int:
    """What the figures beside a bar leave of a line."""
    return max(6, min(40, width - 68))


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


def lane_values(lanes: Mapping[int, Lane]) -> list[dict[str, object]]:
    """Rows in use, for those who read JSON."""
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
