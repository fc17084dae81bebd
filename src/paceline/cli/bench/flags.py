"""`paceline bench serve | sweep | compare | throughput | latency | embed | structured | drafts` on the command line.

What they do is in separate files, imported when one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from paceline.cli.command import Command, CommandGroup
from paceline.lab.bench.bench_options import (
    SWEEP_SECONDS,
    CompareOptions,
    DraftsOptions,
    EmbedBenchOptions,
    LatencyOptions,
    LoadRunOptions,
    MoreBounds,
    StructuredOptions,
    SweepOptions,
    ThroughputOptions,
)
from paceline.lab.bench.shapes import MAX_MODEL_LEN, MAX_NUM_SEQS

HELP = "Measure a server under load, or the engine alone."
THROUGHPUT_HELP = """
Measure the engine with all requests at once.

  paceline bench throughput --shape tiny --workload decode-b1,decode-b8
  paceline bench throughput --shape qwen3-0.6b --workload nano --json out.json
  paceline bench throughput --shape tiny --mode continuous,static

--shape measures a well-known shape with random weights, --model any model. End tokens are ignored: every request
gets exactly its number of tokens, and the clock stops with the last of them.
"""
LATENCY_HELP = """
Measure the engine with requests that arrive over time.

  paceline bench latency --trace azure.csv --workload azure-conv@20
  paceline bench latency --shape tiny --rate 20 --num 100 --output-tokens 16

Arrivals are Poisson. TTFT is the time from a request's arrival to its first token, ITL the time between two deliveries
to one request.
"""
EMBED_HELP = """
Measure vectors: clients that ask for one after the other, texts of two lengths.

  paceline bench embed
  paceline bench embed --quantization int8 --clients 8
  paceline bench embed --shape tiny --pooling mean --long-share 0

Texts are random tokens, and nothing but texts is counted: the engine computes no padding.
"""
STRUCTURED_HELP = """
Measure answers by a JSON schema against free text of the same length, in turns.

  paceline bench structured --clients 8
  paceline bench structured --schema person.json --whitespace
  paceline bench structured --shape tiny --rows 64

Every answer is as long in both. Tokens per step is what a row gets in a step: tokens that the schema leaves no choice
about come several at once. With --shape the words are made up, and answers end where they are cut off.
"""

DRAFTS_HELP = """
Measure what drafts bring: the same answers without and with them.

  paceline bench drafts --data question.jsonl --clients 1,4,8,16
  paceline bench drafts --data question.jsonl --speculative-config ngram
  paceline bench drafts --script log.tar.gz
  paceline bench drafts --drafter oracle --shape qwen3-0.6b --rows 1,64

Both engines run in one process, in turns, and make the same tokens. A ratio above 1 means that drafts are faster.
--script counts the tokens a step would give if every draft were verified, for texts that were recorded; no model
computes.
"""

SERVE_HELP = """
Send load to a server with the OpenAI API and measure it.

  paceline bench serve --rate 4 --num-prompts 100 --output-len 64
  paceline bench serve --max-concurrency 16 --duration 60 --json run.json
  paceline bench serve --workload azure.csv --goodput ttft:1000 tpot:50
  paceline bench serve --ramp 1:20:60 --duration 90 --arrivals gamma:2

With --rate, --ramp or a trace, requests are sent at their times, whether or not earlier ones are answered. With
--max-concurrency alone, that number of users send again as soon as they are answered. With none of these all requests
are sent at once. The key is read from PACELINE_API_KEY or OPENAI_API_KEY. Ctrl-C shows the figures so far.
"""
SWEEP_HELP = """
Measure a server at several loads and draw the curves.

  paceline bench sweep --rates 1,2,4,8 --duration 30 --goodput ttft:1000
  paceline bench sweep --concurrencies 1,4,16 --num-prompts 200 --output curve

The folder gets report.html (self-contained), its pictures as PNG, and sweep.json.
"""
COMPARE_HELP = """
Compare two result files: better, worse, or noise.

  paceline bench compare before.json after.json
  paceline bench compare before.json after.json --fail-if-worse 10%

Where the files hold samples, each difference has a confidence interval. Results of bench serve, sweep, throughput and
latency can be compared, each with its own kind.
"""


def _later(module: str, name: str) -> Callable[[Mapping[str, Any]], None]:
    """A command whose file is imported when it runs."""

    def run(values: Mapping[str, Any]) -> None:
        getattr(import_module(f"paceline.cli.bench.{module}"), name)(values)

    return run


ENGINE_PANELS = (
    *("Model", "Sampling", "KV cache", "Step size", "Step timing"),
    *("Batching", "Scheduling policy", "Recording"),
)
ENGINE_DEFAULTS = {
    "max_model_len": f"{MAX_MODEL_LEN} with --shape, else what model and KV cache allow",
    "max_num_seqs": f"{MAX_NUM_SEQS} with --shape, else 128",
    "step_target_ms": "automatic for latency on a GPU, else off",
}
BENCH = CommandGroup(
    name="bench",
    help=HELP,
    headings={
        "Commands": (
            Command(
                name="serve",
                help=SERVE_HELP,
                run=_later("serve", "serve"),
                takes=(LoadRunOptions, MoreBounds),
            ),
            Command(
                name="sweep",
                help=SWEEP_HELP,
                run=_later("sweep", "sweep"),
                takes=(SweepOptions, MoreBounds),
                defaults={"duration": f"{SWEEP_SECONDS:g} for each point, unless --num-prompts is given"},
            ),
            Command(
                name="compare",
                help=COMPARE_HELP,
                run=_later("compare_results", "compare"),
                takes=(CompareOptions,),
            ),
            Command(
                name="throughput",
                help=THROUGHPUT_HELP,
                run=_later("run", "throughput"),
                takes=(ThroughputOptions, *ENGINE_PANELS),
                defaults={**ENGINE_DEFAULTS, "temperature": "0.6; decode-b*: 0"},
            ),
            Command(
                name="latency",
                help=LATENCY_HELP,
                run=_later("run", "latency"),
                takes=(LatencyOptions, *ENGINE_PANELS),
                defaults=ENGINE_DEFAULTS,
            ),
            Command(
                name="embed",
                help=EMBED_HELP,
                run=_later("run", "embed"),
                takes=(EmbedBenchOptions, *ENGINE_PANELS),
                defaults={**ENGINE_DEFAULTS, "model": "minilm"},
            ),
            Command(
                name="structured",
                help=STRUCTURED_HELP,
                run=_later("run", "structured"),
                takes=(StructuredOptions, *ENGINE_PANELS),
                defaults={**ENGINE_DEFAULTS, "temperature": "0", "max_num_seqs": "--clients"},
            ),
            Command(
                name="drafts",
                help=DRAFTS_HELP,
                run=_later("drafts", "drafts"),
                takes=(DraftsOptions, "Model", "KV cache"),
                defaults={"speculative_config": "auto"},
            ),
        )
    },
)
