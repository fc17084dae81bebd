"""Figures on README and documentation pages, made from the files in benchmarks/results.

A table stands between `<!--figures:NAME-->` and `<!--end-->` and is written by this program; `sentences()` lists
what running text repeats. A test compares both with the result files, so that no two pages disagree.

    python -m tools.figure_tables
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SMALL, LARGE = "qwen3-0.6b", "llama-3.1-8b"
SHORT = {SMALL: "0.6b", LARGE: "8b"}
OUTPUT, TOTAL, REQUESTS = "output_tokens_per_s", "total_tokens_per_s", "requests_per_s"
# A workload of `paceline bench throughput`: what it is judged by, and how a reader would call it.
WORKLOADS = {
    "decode-b1": (OUTPUT, "decode, 1 stream (tok/s)"),
    "decode-b8": (OUTPUT, "decode, 8 streams"),
    "decode-b64": (OUTPUT, "decode, 64 streams"),
    "decode-b256": (OUTPUT, "decode, 256 streams"),
    "decode-b1024": (OUTPUT, "decode, 1,024 streams"),
    "nano": (OUTPUT, "256 requests, mixed lengths (tok/s)"),
    "azure-conv-1000": (REQUESTS, "1,000 recorded chats (requests/s)"),
    "prefix-2048x256": (TOTAL, "256 prompts with a shared prefix (tok/s)"),
    "prefill-64x3500": (TOTAL, "64 prompts of 3,500 (tok/s)"),
}
ONLINE = ((SMALL, "azure-conv@32"), (LARGE, "azure-conv@20"), (LARGE, "azure-conv@32"))
_MARKED = re.compile(r"(<!--figures:([\w-]+)-->\n).*?(<!--end-->)", re.DOTALL)


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- figures


def ours(model: str, workload: str, name: str = "") -> float:
    """A row of Paceline's newest run."""
    rows = result(name or f"engine_h200_throughput_{SHORT[model]}")["results"]
    (row,) = (row for row in rows if row["workload"] == workload)
    return float(row[WORKLOADS[workload][0]])


def vllm(model: str, workload: str) -> float:
    """The better of vLLM's default and tuned figures."""
    runs = result("peers_h200")["vllm"]["throughput"].values()
    rows = [run[model][workload] for run in runs if workload in run[model]]
    return max(float(row[WORKLOADS[workload][0]]) for row in rows)


def sglang(model: str, workload: str) -> tuple[float, float]:
    """SGLang, and Paceline on the same kind of card."""
    peer, key = result("peers_h200")["sglang"], WORKLOADS[workload][0]
    beside = peer["paceline_beside_it"]["throughput"]
    return peer["throughput"][model][workload][key], beside[model][workload][key]


def mean_ratio(model: str) -> float:
    """Paceline over vLLM, the geometric mean of all workloads."""
    logs = [math.log(ours(model, workload) / vllm(model, workload)) for workload in WORKLOADS]
    return math.exp(sum(logs) / len(logs))


def latency(file: str, workload: str, kind: str, percentile: str) -> float:
    """Milliseconds of Paceline."""
    (row,) = (row for row in result(file)["results"] if row["workload"] == workload)
    return 1e3 * float(row[f"{kind}_s"][percentile])


def vllm_latency(model: str, workload: str, kind: str, percentile: str, run: str = "default") -> float:
    return float(result("peers_h200")["vllm"]["latency"][run][model][workload][f"{kind}_ms"][percentile])


# ---------------------------------------------------------------- tables


def throughput(workloads: Iterable[str] = tuple(WORKLOADS)) -> list[str]:
    lines = ["| one H200 | 0.6B Paceline | vLLM | ratio | 8B Paceline | vLLM | ratio |", _rule(7)]
    for workload in workloads:
        cells = [WORKLOADS[workload][1]]
        for model in (SMALL, LARGE):
            mine, theirs = ours(model, workload), vllm(model, workload)
            cells += [*_better(mine, theirs, highest=True), f"{mine / theirs:.2f}"]
        lines.append(_row(cells))
    means = [["", "", f"**{mean_ratio(model):.2f}**"] for model in (SMALL, LARGE)]
    return [*lines, _row(["geometric mean of all nine workloads", *means[0], *means[1]])]


def throughput_short() -> list[str]:
    return throughput(("decode-b1", "decode-b256", "azure-conv-1000", "prefill-64x3500"))


def throughput_sglang() -> list[str]:
    lines = ["| | 0.6B Paceline | SGLang | ratio | 8B Paceline | SGLang | ratio |", _rule(7)]
    for workload, (_, title) in WORKLOADS.items():
        cells = [title]
        for model in (SMALL, LARGE):
            theirs, mine = sglang(model, workload)
            cells += [*_better(mine, theirs, highest=True), f"{mine / theirs:.2f}"]
        lines.append(_row(cells))
    return lines


def latency_short() -> list[str]:
    """Default flags on both sides: the rows that are lost stand beside those that are won."""
    lines = ["| load, ms | TTFT Paceline | vLLM | ITL p99 Paceline | vLLM |", _rule(5)]
    for model, workload in ONLINE:
        file = "engine_h200_latency_0.6b" if model == SMALL else "engine_h200_latency_8b_paced"
        first = "p50" if (model, workload) == ONLINE[2] else "p99"
        cells = [f"{SHORT[model].upper()}, {workload.partition('@')[2]} requests/s, TTFT {first}"]
        for kind, percentile in (("ttft", first), ("itl", "p99")):
            mine = latency(file, workload, kind, percentile)
            cells += _better(mine, vllm_latency(model, workload, kind, percentile), highest=False)
        lines.append(_row(cells))
    return lines


def latency_full() -> list[str]:
    """TTFT and ITL at p50 and p99 of every run."""
    lines = ["| | TTFT p50 ms | TTFT p99 | ITL p50 | ITL p99 |", _rule(5)]
    for model, workload in ONLINE:
        rate = workload.partition("@")[2]
        files = {SMALL: {"": "engine_h200_latency_0.6b"}}.get(
            model,
            {"": "engine_h200_latency_8b_paced", ", short prompts first": "engine_h200_latency_8b_shortest"},
        )
        where = f"{SHORT[model].upper()}, {rate} requests/s"
        kinds = [(kind, percentile) for kind in ("ttft", "itl") for percentile in ("p50", "p99")]
        for label, file in files.items():
            cells = [_shown(latency(file, workload, *pair)) for pair in kinds]
            lines.append(_row([f"{where}: Paceline{label}", *cells]))
        for run in ("default", "tuned"):
            if model in result("peers_h200")["vllm"]["latency"][run]:
                cells = [_shown(vllm_latency(model, workload, *pair, run)) for pair in kinds]
                lines.append(_row([f"{where}: vLLM, {run}", *cells]))
    return lines


def cpu() -> list[str]:
    peers = result("peers_cpu")
    kinds = {"TTFT p50 ms": "ttft_ms", "ITL p50 ms": "itl_ms"}
    heads = [f"{name} {title}" for title in ("tok/s", *kinds) for name in ("Paceline", "llama.cpp")]
    lines = [_row(["clients", *heads]), _rule(1 + len(heads))]
    for clients in peers["paceline"]["clients"]:
        mine, theirs = (peers[name]["clients"][clients] for name in ("paceline", "llama.cpp"))
        cells = [clients, *_better(mine[OUTPUT], theirs[OUTPUT], highest=True)]
        for kind in kinds.values():
            cells += _better(mine[kind]["p50"], theirs[kind]["p50"], highest=False)
        lines.append(_row(cells))
    return lines


def cpu_short() -> list[str]:
    """Output tokens per second, a column for each number of clients."""
    names = ("paceline", "llama.cpp")
    clients = {name: result("peers_cpu")[name]["clients"] for name in names}
    pairs = [
        _better(*(clients[name][n][OUTPUT] for name in names), highest=True) for n in clients["paceline"]
    ]
    rows = [
        _row([title, *cells])
        for title, cells in zip(("Paceline", "llama.cpp"), zip(*pairs, strict=True), strict=True)
    ]
    return [_row(["tok/s by streams", *clients["paceline"]]), _rule(1 + len(pairs)), *rows]


def step_cost() -> list[str]:
    file = result("step_cost")
    lines = ["| rows | CPU mean us | CPU p99 us |", _rule(3)]
    for rows in ("1", "16", "64", "256", "1024", "4096", "churn"):
        title = "1,024, 32 join and 32 leave in each step" if rows == "churn" else f"{int(rows):,}"
        found = file[rows]
        lines.append(_row([title, f"{found['cpu_mean_us']:,.0f}", f"{found['cpu_p99_us']:,.0f}"]))
    return lines


def startup() -> list[str]:
    lines = ["| start, nothing cached (s) | Paceline | vLLM | SGLang |", _rule(4)]
    for model, short in SHORT.items():
        mine = result(f"engine_h200_throughput_{short}")["startup_s"]
        peers = [result("peers_h200")[name]["startup_s"][model] for name in ("vllm", "sglang")]
        lines.append(_row([short.upper(), f"**{mine:.1f}**", *map(str, peers)]))
    return lines


def policies() -> list[str]:
    """The newest run of each study on the CPU server."""
    lines = ["| policy | measured | bound | found |", _rule(4)]
    for name in ("policy_live_priority_cpu", "policy_live_fair_cpu"):
        for line in result(name)["runs"][-1]["lines"]:
            found = line["found"] if line["holds"] is not False else f"**{line['found']}** (missed)"
            lines.append(_row([f"`{line['policy']}`", line["what"], line["asked"], found]))
    return lines


def dial() -> list[str]:
    lines = ["| run | p99 between tokens, medians over 20 s, ms | furthest from the target |", _rule(3)]
    for number, run in enumerate(result("dial_cpu_server"), 1):
        medians = ", ".join(f"{value:.0f}" for value in run["medians_ms"])
        lines.append(_row([str(number), medians, f"{100 * run['worst']:.0f} %"]))
    return lines


def simulator() -> list[str]:
    """The errors of the cost model that was fitted to all runs of a machine."""
    lines = ["| run | throughput | TTFT | ITL | end to end |", _rule(5)]
    runs = {
        "azure20": "H200, 8B, recorded chats, 20 requests/s",
        "azure8": "H200, 8B, recorded chats, 8 requests/s",
        "fixed28": "H200, 8B, 512 tokens in, 128 out, 28 requests/s",
        "bursts": "two CPU cores, SmolLM2, bursts",
        "chats": "two CPU cores, SmolLM2, chats",
        "prompts": "two CPU cores, SmolLM2, long prompts",
    }
    compared = [*result("calibration_h200_8b")["compared"], *result("calibration_cpu_server")["compared"]]
    errors = {
        entry["run"]: {measure["name"]: measure["error"] for measure in entry["measures"]}
        for entry in compared
        if entry["fitted_to"] == "all"
    }
    for name, title in runs.items():
        cells = [f"{100 * errors[name]['throughput']:+.1f} %"]
        for kind in ("TTFT", "ITL", "end to end"):
            parts = [f"{100 * errors[name][f'{kind} {at}']:+.1f}" for at in ("p50", "p90", "p99")]
            cells.append(f"{' / '.join(parts)} %")
        lines.append(_row([title, *cells]))
    return lines


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "throughput": throughput,
    "throughput-short": throughput_short,
    "throughput-sglang": throughput_sglang,
    "latency": latency_full,
    "latency-short": latency_short,
    "cpu": cpu,
    "cpu-short": cpu_short,
    "step-cost": step_cost,
    "startup": startup,
    "policies": policies,
    "dial": dial,
    "simulator": simulator,
}


def _better(mine: float, theirs: float, *, highest: bool) -> list[str]:
    """Two figures, the better one in bold; equal ones plain."""
    texts = [_shown(mine), _shown(theirs)]
    if mine != theirs:
        best = 0 if (mine > theirs) is highest else 1
        texts[best] = f"**{texts[best]}**"
    return texts


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return f"|{'---|' * columns}"


# ---------------------------------------------------------------- pages


def sentences() -> dict[str, list[str]]:
    """What pages say in running text, by page."""
    decode = f"{round(ours(SMALL, 'decode-b256'), -3):,.0f}"
    starts = [result(f"engine_h200_throughput_{short}")["startup_s"] for short in SHORT.values()]
    demo = {
        mode["mode"]: mode["summary"]["output_tokens_per_s"] for mode in result("demo_h200_0.6b")["modes"]
    }
    return {
        "README.md": [f"[{result('step_cost')['1024']['cpu_mean_us']:.0f} us]"],
        "docs/guides/serve-on-a-gpu.md": [
            f"256 rows decode at {decode} tokens/s",
            f"{min(starts):.0f} to {max(starts):.0f} seconds",
        ],
        "docs/concepts/continuous-batching.md": [
            f"{demo['continuous']:,.0f} tokens/s instead of {demo['static']:,.0f}"
        ],
    }


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(_table, text)


def _table(found: re.Match[str]) -> str:
    start, name, end = found.groups()
    return start + "\n".join(TABLES[name]()) + "\n" + end


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            page.write_text(filled(text), encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
