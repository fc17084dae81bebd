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


def cpu(name: str = "peers_cpu") -> list[str]:
    peers = result(name)
    kinds = {"TTFT p50 ms": "ttft_p50_ms", "ITL p50 ms": "itl_p50_ms"}
    heads = [f"{name} {title}" for title in ("tok/s", *kinds) for name in ("Paceline", "llama.cpp")]
    lines = [_row(["clients", *heads]), _rule(1 + len(heads))]
    for clients in peers["paceline"]["clients"]:
        mine, theirs = (peers[name]["clients"][clients] for name in ("paceline", "llama.cpp"))
        cells = [clients, *_better(mine[OUTPUT], theirs[OUTPUT], highest=True)]
        for kind in kinds.values():
            cells += _better(mine[kind], theirs[kind], highest=False)
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


def drafts() -> list[str]:
    """Speed with drafts over speed without, by kind of question and clients."""
    rows = result("drafts_cpu")["drafts"]
    clients = list(dict.fromkeys(row["clients"] for row in rows))
    heads = [f"{n} {'client' if n == 1 else 'clients'}" for n in clients]
    lines = [
        _row(["questions", *heads, "tokens per step, 1 client", "drafts that were right"]),
        _rule(3 + len(clients)),
    ]
    for category in dict.fromkeys(row["category"] for row in rows):
        own = [row for row in rows if row["category"] == category]
        cells = [f"{row['ratio']:.2f}" for row in own]
        more = (
            [f"{own[0]['tokens per step']:.2f}", f"{own[0]['right']:.0%}"] if "right" in own[0] else ["", ""]
        )
        lines.append(_row([category.replace("_", " "), *cells, *more]))
    return lines


def drafts_h200() -> list[str]:
    """Speed with drafts over speed without, by rows, shape and share of drafts that are right."""
    columns: dict[str, dict[int, float]] = {}
    for run in result("drafts_h200")["runs"]:
        acceptance = run["engine"]["speculative_config"]["acceptance"]
        column = columns.setdefault(f"{SHORT[run['model']].upper()}, {acceptance:g}", {})
        column |= {found["clients"]: found["ratio"] for found in run["results"]}
    lines = [_row(["rows", *columns]), _rule(1 + len(columns))]
    for rows in next(iter(columns.values())):
        cells = [f"{column[rows]:.2f}" if rows in column else "" for column in columns.values()]
        lines.append(_row([f"{rows:,}", *cells]))
    return lines


def drafts_simulated() -> list[str]:
    """Throughput and time between tokens with drafts over those without, by rate and chance to be right."""
    rows = result("drafts_simulated")["simulated"]
    chances = list(dict.fromkeys(row["acceptance"] for row in rows))
    heads = [f"{name}, {chance}" for chance in chances for name in ("throughput", "ITL")]
    lines = [_row(["requests/s", "ITL off, ms", *heads]), _rule(2 + len(heads))]
    for rate in dict.fromkeys(row["requests/s"] for row in rows):
        own = [row for row in rows if row["requests/s"] == rate]
        cells = [f"{row[name]:.3f}" for row in own for name in ("throughput", "mean ITL")]
        lines.append(_row([f"{rate:g}", f"{own[0]['ITL without drafts, ms']:.1f}", *cells]))
    return lines


def long_prompts() -> list[str]:
    """What a long prompt and the requests beside it see."""
    names = (
        "TTFT of the long one, s",
        "ITL p50, ms",
        "ITL p99, ms",
        "short TTFT p50, ms",
        "short TTFT p99, ms",
    )
    lines = [_row(["long prompt", "steps", *names]), _rule(2 + len(names))]
    for row in result("long_prompts")["rows"]:
        cells = ["" if row[name] is None else f"{row[name]:.1f}" for name in names]
        lines.append(_row([row["case"], row["steps"], *cells]))
    return lines


def eviction() -> list[str]:
    """Hits of the prefix cache by trace, size and order."""
    orders = ("lru %", "reuse %", "belady %")
    lines = [_row(["trace", "cache", "lru", "reuse", "belady"]), _rule(5)]
    for name, note in (("eviction", ""), ("eviction_known", ", next 30 s known")):
        for run in result(name)["runs"]:
            title = run["trace"].removesuffix(".jsonl").removesuffix(".tar.gz").replace("_", " ")
            lines.append(_row([title + note, run["cache"], *(f"{run[order]:.1f} %" for order in orders)]))
    return lines


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
    for number, run in enumerate(result("dial_cpu_server")["outcomes"], 1):
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


def kernel(name: str, shape: str) -> Mapping[str, float]:
    """A row of the kernels' file."""
    (found,) = (
        row for row in result("kernels_h200")["kernels"] if row["kernel"] == name and row["shape"] == shape
    )
    return found  # type: ignore[no-any-return]


def decode_attention() -> list[str]:
    lines = [
        "| decode attention, 16 heads, 8 kv heads of 128, block 64 | us per layer | GB/s | of the read ceiling |",
        _rule(4),
    ]
    for shape, title in {
        "uniform: 256 rows, 214k tokens": "256 rows, 100 to 1,535 tokens (879 MB)",
        "skewed: 97 rows, 100k tokens": "97 rows, skewed, one of 12,500 tokens (410 MB)",
        "skewed: 256 rows, 330k tokens": "256 rows, skewed, 330,000 tokens",
        "equal: 1024 rows, 147k tokens": "1,024 rows of 144 tokens",
        "equal: 256 rows, 37k tokens": "256 rows of 144 tokens",
        "equal: 64 rows, 9k tokens": "64 rows of 144 tokens",
        "equal: 8 rows, 1k tokens": "8 rows of 144 tokens",
        "equal: 1 rows, 0k tokens": "1 row of 144 tokens",
        "one row: 1 rows, 32k tokens": "1 row of 32,000 tokens",
    }.items():
        found = kernel("decode attention", f"{shape}, 16/8 heads")
        cells = (f"{found['us']:.1f}", f"{found['rate']:,.0f}", f"{100 * found['share']:.0f} %")
        lines.append(_row([title, *cells]))
    return lines


def prefill_attention() -> list[str]:
    sizes = (1024, 2048, 3584, 4096)
    heads = [f"{size:,}" for size in sizes]
    lines = [_row(["prefill attention, causal, TFLOP/s by tokens", *heads]), _rule(1 + len(sizes))]
    kinds = {
        "ours over pages": ("prefill attention",),
        "torch SDPA, cuDNN / flash, dense": ("torch SDPA cudnn_attention", "torch SDPA flash_attention"),
    }
    for heads_of in (16, 32):
        for title, names in kinds.items():
            cells = []
            for size in sizes:
                shape = f"1 x {size} tokens after 0, {heads_of}/8 heads"
                cells.append(" / ".join(f"{kernel(name, shape)['rate']:.0f}" for name in names))
            lines.append(_row([f"{title}, {heads_of} heads", *cells]))
    return lines


def few_rows() -> list[str]:
    shapes = {
        "qkv": "4096 x 1024",
        "output": "1024 x 2048",
        "gate-up": "6144 x 1024",
        "down": "1024 x 3072",
        "head": "151936 x 1024",
    }
    heads = [f"{name} {shape}" for name, shape in shapes.items()]
    lines = [_row(["matrix products of few rows, us", *heads]), _rule(1 + len(shapes))]
    for rows, own in ((1, "row product"), (8, "skinny product")):
        for title, name in (("cuBLAS", "cuBLAS"), ("ours", own)):
            found = {
                row["shape"]: row["us"] for row in result("kernels_h200")["kernels"] if row["kernel"] == name
            }
            times = (found.get(f"{rows} rows, {shape}") for shape in shapes.values())
            cells = ["" if us is None else f"{us:.1f}" for us in times]
            lines.append(_row([f"{rows} row{'s' if rows > 1 else ''}, {title}", *cells]))
    return lines


def swaps() -> list[str]:
    columns = {f"{blocks}": f"8B, {blocks} blocks in a row" for blocks in (1, 4, 16, 64, 256)}
    columns["256, host blocks scattered"] = "8B, 256 blocks scattered"
    lines = [_row(["blocks of 8B (8 MB each)", *columns]), _rule(1 + len(columns))]
    for title, key in (("to the host, GB/s", "out"), ("back, GB/s", "back")):
        lines.append(_row([title, *(f"{result('swap_h200')[name][key]:.1f}" for name in columns.values())]))
    queued = (result("swap_h200")[name]["queued_ms"] for name in columns.values())
    return [*lines, _row(["host time to queue it, ms", *(f"{ms:.2g}" for ms in queued)])]


def modes_demo() -> list[str]:
    runs = {run["mode"]: run for run in result("demo_h200_0.6b")["modes"]}
    order = ("static", "dynamic", "continuous")
    first, last = runs["static"], runs["continuous"]
    requests = first["summary"]["requests"]["finished"]
    lines = [_row([f"{requests:,} requests", *order, "against static"]), _rule(5)]

    def seconds(kind: str, *percentiles: str) -> list[str]:
        times = {mode: [runs[mode]["summary"][kind][at] for at in percentiles] for mode in order}
        cells = [" / ".join(f"{value:#.3g}" for value in times[mode]) for mode in order]
        pairs = zip(times["static"], times["continuous"], strict=True)
        return [*cells, " / ".join(f"{100 * (now / before - 1):.0f} %" for before, now in pairs)]

    rates = [runs[mode]["summary"][OUTPUT] for mode in order]
    useful = [runs[mode]["useful_slots"] for mode in order]
    padded = [_share(runs[mode]["summary"]["padded_share"], digits=0) for mode in order]
    ratios = (
        last["summary"][OUTPUT] / first["summary"][OUTPUT],
        last["useful_slots"] / first["useful_slots"],
    )
    return [
        *lines,
        _row(["output tokens/s", *(f"{rate:,.0f}" for rate in rates), f"{ratios[0]:.1f} times"]),
        _row(["answer p50 / p99, s", *seconds("e2e_s", "p50", "p99")]),
        _row(["first token p50, s", *seconds("ttft_s", "p50")]),
        _row(["padded share", *padded, ""]),
        _row(
            ["slots that do useful work", *(f"{100 * it:.0f} %" for it in useful), f"{ratios[1]:.1f} times"]
        ),
    ]


def modes_nano() -> list[str]:
    lines = ["| nano | output tokens/s | answer p50 / p99, s | padded | steps |", _rule(5)]
    for run in reversed(result("engine_h200_modes")["results"]):
        answers = f"{run['e2e_s']['p50']:.2f} / {run['e2e_s']['p99']:.2f}"
        padded = _share(run["padded_share"], digits=1)
        lines.append(_row([run["mode"], f"{run[OUTPUT]:,.0f}", answers, padded, f"{run['steps']:,}"]))
    return lines


def _share(value: float, *, digits: int) -> str:
    return f"{100 * value:.{digits}f} %" if value else "none"


def log_cost() -> list[str]:
    file = result("trail_cost_cpu")
    lines = ["| | with the model | scheduler alone, engine thread |", _rule(3)]
    for title, name in {
        "decisions kept in memory (default)": "ring",
        "`--decision-log`": "decision log",
        "`--run-log`": "run log",
        "both": "both logs",
    }.items():
        cells = (file["model"][name]["cpu"], file["churn"][name]["engine"])
        lines.append(_row([title, *(f"{ratio:.2f}" for ratio in cells)]))
    return lines


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "throughput": throughput,
    "throughput-short": throughput_short,
    "throughput-sglang": throughput_sglang,
    "latency": latency_full,
    "latency-short": latency_short,
    "cpu": cpu,
    "cpu-q4-0": lambda: cpu("peers_cpu_q4_0"),
    "cpu-xeon": lambda: cpu("peers_cpu_xeon"),
    "cpu-q4-0-xeon": lambda: cpu("peers_cpu_q4_0_xeon"),
    "cpu-zen5": lambda: cpu("peers_cpu_zen5"),
    "cpu-q4-0-zen5": lambda: cpu("peers_cpu_q4_0_zen5"),
    "cpu-short": cpu_short,
    "drafts": drafts,
    "drafts-h200": drafts_h200,
    "drafts-simulated": drafts_simulated,
    "eviction": eviction,
    "long-prompts": long_prompts,
    "step-cost": step_cost,
    "startup": startup,
    "policies": policies,
    "dial": dial,
    "simulator": simulator,
    "decode-attention": decode_attention,
    "prefill-attention": prefill_attention,
    "few-rows": few_rows,
    "swaps": swaps,
    "modes-demo": modes_demo,
    "modes-nano": modes_nano,
    "log-cost": log_cost,
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
    ceilings = result("kernels_h200")["ceilings"]
    swapped = result("swap_h200")["a step of 16 GB"]
    page = [result("page_cost_h200_server")[rows]["watch_us_per_step"] for rows in ("64", "256")]
    client = result("load_generator")["results"][-1]
    return {
        "docs/measurements/gpu-kernels.md": [
            f"{ceilings['read_GB_s']:,.0f} GB/s read in order",
            f"{ceilings['random_16KB_read_GB_s']:,.0f} in random pieces of 16 KB",
            f"{ceilings['matrix_TFLOP_s']:.0f} TFLOP/s",
            f"{swapped['alone, ms']:.2f} ms alone, {swapped['beside swaps out, ms']:.2f} beside copies to the host",
            f"{swapped['beside swaps in, ms']:.2f} beside copies back",
        ],
        "docs/measurements/streaming-cost.md": [
            f"{page[0]:.1f} and {page[1]:.1f} us per step",
            f"{round(client['tokens_per_s'], -2):,.0f} tokens/s with {100 * client['client_cpu_share']:.0f} %",
            f"{client['late_p50_ms']:.2f} ms after the server's write",
        ],
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
