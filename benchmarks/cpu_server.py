"""A server on this machine's CPU: throughput and latency, beside llama.cpp, memory, a busy machine.

*load*: a closed loop on any OpenAI-compatible server, or on the engine in this process. Each of N clients sends a
prompt of about 108 tokens of real text, reads 64 tokens as a stream (greedy, end of text ignored) and sends the next.
The same prompts in the same order go to every target, so that two servers on one machine can be compared; *outside* is
the share of the time that our server is not in a call that computes a step. *peers*: the same loop on llama.cpp's
server and on Paceline, in turns, with the same file. *copy*: a copy of a GGUF file with its Q4_1 matrices as Q4_0,
which llama.cpp repacks for the processor, or as another type. *quantized*: a file's numbers as a folder of float32
safetensors, run as they are, and with `--quantization int8` and `int4`, in turns, by the engine in this process.
*memory*: anonymous bytes after loading and with a filled KV cache. *idle*: processor time of a server without requests.
*prompt*: one long prompt alone. *bulk*: the closed loop on a server that also answers one call for the vectors of many
texts meanwhile, beside the same loop alone. *busy*: the server while one busy loop runs on each core (they end with
this program), beside the quiet machine: a prompt of 200 tokens with 40 tokens of output; the size of steps, and how
soon it returns; what the card and the log say; and a prompt of 801 tokens in steps of 256, of which no answer may be a
503. Run it on a machine that does nothing else.

    python -m benchmarks.cpu_server load [--url http://127.0.0.1:8000] [--concurrency 1,8,16,32] [--requests 4]
    python -m benchmarks.cpu_server peers LLAMA_SERVER MODEL.gguf [--rounds 3]
    python -m benchmarks.cpu_server copy MODEL.gguf COPY.gguf [--type Q8_0]
    python -m benchmarks.cpu_server quantized [--model MODEL] [--clients 8] [--rounds 3]
    python -m benchmarks.cpu_server memory [--model MODEL] [--tokens 4096]
    python -m benchmarks.cpu_server idle [--model MODEL] [--seconds 60]
    python -m benchmarks.cpu_server prompt [--model MODEL] [--tokens 2000]
    python -m benchmarks.cpu_server bulk [--model MODEL] [--clients 8] [--inputs 2048] [--rounds 3]
    python -m benchmarks.cpu_server busy [--model MODEL] [--runs 5]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np

from benchmarks.harness import (
    GREEDY,
    HOST,
    TEXT,
    Benchmark,
    Found,
    Given,
    Server,
    children,
    flag,
    in_turns,
    row,
    served,
    served_by,
    spread,
    streamed,
    table,
)

bench = Benchmark(__doc__)
MODEL_FLAG = flag("--model", None, "model to serve; default: SmolLM2-135M-Instruct")


# -- load ----------------------------------------------------------------------------------------------------

OUTPUT_TOKENS = 64
PROMPT_WORDS, PROMPT_TOKENS = 82, 108  # of English, for a vocabulary of 49k
Send = Callable[[str], AsyncIterator[int]]  # sends a prompt and yields how many tokens came


async def closed_loop(
    send: Send, prompts: list[str], concurrency: int, prompt_tokens: int, in_steps_s: Callable[[], float]
) -> Found:
    """All prompts through `concurrency` clients, each sending its next when the last is done."""
    waiting = prompts[::-1]
    first_ms, gaps_ms, num_output = list[float](), list[float](), 0

    async def client() -> None:
        nonlocal num_output
        while waiting:
            last_s, is_first = time.perf_counter(), True
            async for tokens in send(waiting.pop()):
                gap_ms, last_s = (time.perf_counter() - last_s) * 1e3, time.perf_counter()
                if is_first:
                    first_ms.append(gap_ms)
                else:
                    gaps_ms.extend([gap_ms / tokens] * tokens)
                is_first, num_output = False, num_output + tokens

    started_s, before_s = time.perf_counter(), in_steps_s()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - started_s
    outside = 1 - (in_steps_s() - before_s) / seconds
    return {
        "concurrency": concurrency,
        "requests": len(prompts),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_output + prompt_tokens * len(prompts)) / seconds, 1),
        "ttft_p50_ms": round(float(np.median(first_ms)), 1),
        "itl_p50_ms": round(float(np.median(gaps_ms)), 2),
        "itl_p99_ms": round(float(np.percentile(gaps_ms, 99)), 2),
        "outside_steps": None if math.isnan(outside) else round(outside, 3),
    }


def make_prompts(count: int) -> list[str]:
    """Different pieces of a text: none shares a beginning with another."""
    words = TEXT.read_text().split()
    starts = (index * 37 % len(words) for index in range(count))
    return [" ".join((words * 2)[start : start + PROMPT_WORDS]) for start in starts]


def http_target(url: str, model: str, sampling: Found) -> Send:
    parts = urlsplit(url)
    options = {"model": model, "max_tokens": OUTPUT_TOKENS, "stream": True, **GREEDY, **sampling}
    path, host = f"{parts.path.rstrip('/')}/v1/completions", parts.hostname or "127.0.0.1"

    async def send(prompt: str) -> AsyncIterator[int]:
        async with streamed(parts.port or 80, path, {**options, "prompt": prompt}, host) as answer:
            if answer.status != 200:
                raise SystemExit(f"{url} answered {answer.status}")
            async for event in answer.events:
                choices = json.loads(event).get("choices") or [{}]
                if choices[0].get("text"):
                    yield 1

    return send


def first_model(url: str) -> str:
    """The name of the model that a server has."""
    with urlopen(f"{url}/v1/models") as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def steps_clock(url: str | None) -> Callable[[], float]:
    """Reads how long a server of ours has been in steps; what others count is not a number."""

    def read() -> float:
        with urlopen(f"{url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        (seconds,) = (line.split()[1] for line in lines if line.startswith("paceline:cpu_call_seconds_total"))
        return float(seconds)

    try:
        read()
    except (OSError, ValueError):
        return lambda: math.nan
    return read


def in_process_target(model: str | None) -> tuple[Send, Callable[[str], int]]:
    from paceline import AsyncLLM, SamplingParams

    engine = AsyncLLM(model, enable_prefix_caching=False)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    tokenizer = engine.get_tokenizer()
    assert tokenizer is not None
    config = engine.loaded.config
    print(f"token budget {config.scheduler.max_num_batched_tokens}, {config.kv.num_blocks} KV blocks")

    async def send(prompt: str) -> AsyncIterator[int]:
        seen = 0
        async for output in engine.generate(prompt, sampling):
            count = len(output.outputs[0].token_ids)
            if count > seen:
                yield count - seen
            seen = count

    return send, lambda text: len(tokenizer.encode(text))


@bench.part(
    flag("--url", None, "an OpenAI-compatible server; without it the engine runs in this process"),
    flag("--model", None, "model in this process; with --url its name, else the server's first"),
    flag("--concurrency", "1,8,16,32", "numbers of clients"),
    flag("--requests", 4, "requests per client"),
    flag("--prompt-tokens", PROMPT_TOKENS, "tokens of a prompt, for --url"),
    flag("--sampling", "{}", "fields of the requests, as JSON, for --url"),
)
def load(given: Given) -> Found:
    """Tokens per second and latencies in a closed loop."""
    levels = [int(level) for level in given.concurrency.split(",")]
    prompt_tokens = given.prompt_tokens
    if given.url:
        model = given.model or first_model(given.url)
        send = http_target(given.url, model, json.loads(given.sampling))
    else:
        send, count = in_process_target(given.model)
        prompts = make_prompts(max(levels) * given.requests)
        prompt_tokens = round(sum(map(count, prompts)) / len(prompts))
    print(f"prompts of {prompt_tokens} tokens, {OUTPUT_TOKENS} out")
    results = asyncio.run(all_levels(send, levels, given.requests, prompt_tokens, given.url))
    return {"target": given.url or "in process", "prompt_tokens": prompt_tokens, "results": results}


async def all_levels(
    send: Send, levels: list[int], requests: int, prompt_tokens: int, url: str | None
) -> list[Found]:
    prompts = make_prompts(sum(levels) * requests + 1)
    async for _ in send(prompts.pop()):  # warm up
        pass
    await asyncio.sleep(2.0)  # until the metrics count it
    clock = steps_clock(url)
    table("clients", "requests", "output tok/s", "total tok/s", "TTFT p50", "ITL p50", "ITL p99", "outside")
    results = []
    for level in levels:
        # None comes twice: llama.cpp keeps what it computed for a prompt.
        given, prompts = prompts[: level * requests], prompts[level * requests :]
        results.append(await closed_loop(send, given, level, prompt_tokens, clock))
        row(*results[-1].values())
    return results


# -- beside a call for many vectors ---------------------------------------------------------------------------

INPUT_WORDS = 18  # of a text whose vector is asked for: about 25 tokens


@bench.part(
    MODEL_FLAG,
    flag("--clients", 8, "of the loop"),
    flag("--requests", 2, "requests per client"),
    flag("--inputs", 2048, "texts of the call"),
    flag("--rounds", 3, "runs of each kind, in turns"),
)
def bulk(given: Given) -> Found:
    """What streams notice of one large call. It has to last longer than the loop."""
    words = TEXT.read_text().split()
    starts = (index * 37 % (len(words) - INPUT_WORDS) for index in range(given.inputs))
    texts = [f"{index}: {' '.join(words[start : start + INPUT_WORDS])}" for index, start in enumerate(starts)]
    options = [*([given.model] if given.model else []), "--pooling", "mean", *PACELINE_OPTIONS]
    with served(options) as server, ThreadPoolExecutor(1) as pool:
        url = f"http://{HOST}:{server.port}"
        model = first_model(url)
        send, clock = http_target(url, model, {}), steps_clock(url)

        def alone() -> Found:
            prompts = make_prompts(given.clients * given.requests)
            return asyncio.run(closed_loop(send, prompts, given.clients, PROMPT_TOKENS, clock))

        def beside() -> Found:
            call = pool.submit(server.call, "/v1/embeddings", {"model": model, "input": texts})
            time.sleep(1.0)  # until it is under way
            found, is_answered = alone(), call.done()
            status, body = call.result()
            if status != 200 or is_answered:
                raise SystemExit(f"the call was answered with {status}, before the streams: {is_answered}")
            return {**found, "vectors": len(json.loads(body)["data"])}

        runs = in_turns({"alone": alone, "beside": beside}, given.rounds + 1)
    found: Found = {"inputs": given.inputs, "clients": given.clients}
    table("streams", "ITL p50", "ITL p99", "TTFT p50", "output tok/s")
    for name, results in runs.items():
        keys = ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "output_tokens_per_s")
        found[name] = {key: spread([each[key] for each in results[1:]]) for key in keys}  # the first warms up
        row(name, *(found[name][key]["p50"] for key in keys))
    return found


# -- beside llama.cpp ----------------------------------------------------------------------------------------

LLAMA_OPTIONS = ("-c", 32768, "-np", 32, "-t", 2)
PACELINE_OPTIONS = ("--no-enable-prefix-caching",)


@bench.part(
    flag("llama_server", None, "llama.cpp's program, or - to leave it out"),
    flag("model", None, "GGUF file that both read"),
    flag("--concurrency", "1,8,16,32", "numbers of clients"),
    flag("--requests", 4, "requests per client"),
    flag("--rounds", 3, "runs of each server, in turns"),
)
def peers(given: Given) -> Found:
    """Both servers in turns: medians, and the total tokens per second of every run."""
    levels = [int(level) for level in given.concurrency.split(",")]

    def run(name: str, server: Callable[[], contextlib.AbstractContextManager[Server]]) -> list[Found]:
        print(name)
        with server() as running:
            url = f"http://{HOST}:{running.port}"
            send = http_target(url, first_model(url), {})
            return asyncio.run(all_levels(send, levels, given.requests, PROMPT_TOKENS, url))

    def llama() -> contextlib.AbstractContextManager[Server]:
        command = (given.llama_server, "-m", given.model, *LLAMA_OPTIONS)
        return served_by(lambda port: [*command, "--host", HOST, "--port", port], "/health")

    servers = {"llama.cpp": llama, "paceline": lambda: served([given.model, *PACELINE_OPTIONS])}
    if given.llama_server == "-":
        del servers["llama.cpp"]
    works = {name: partial(run, name, server) for name, server in servers.items()}
    found = in_turns(works, given.rounds)
    settings = {"llama.cpp": LLAMA_OPTIONS, "paceline": PACELINE_OPTIONS}
    return {
        "model": Path(given.model).name,
        **{
            name: {"settings": " ".join(map(str, settings[name])), "clients": medians(runs)}
            for name, runs in found.items()
        },
    }


def medians(runs: list[list[Found]]) -> Found:
    """By the number of clients."""
    return {
        str(found[0]["concurrency"]): {
            **{
                key: round(statistics.median(one[key] for one in found), 3)
                for key, value in found[0].items()
                if value is not None and key not in ("concurrency", "requests")
            },
            "total_tokens_per_s_of_runs": [one["total_tokens_per_s"] for one in found],
        }
        for found in zip(*runs, strict=True)
    }


@bench.part(
    flag("source", None, "GGUF file"),
    flag("target", None, "its copy"),
    flag("--type", "Q4_0", "type of its Q4_1 matrices", choices=("Q4_0", "Q8_0")),
)
def copy(given: Given) -> None:
    """A copy of a GGUF file with its Q4_1 matrices as another type."""
    import gguf

    reader = gguf.GGUFReader(given.source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(given.target, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
    kinds = gguf.GGMLQuantizationType
    wanted = kinds[given.type]
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind == kinds.Q4_1:
            data, kind = gguf.quants.quantize(gguf.quants.dequantize(data, kind), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- weights that are quantised while loading -----------------------------------------------------------------


def write_folder(model: str | None, folder: Path) -> None:
    """The model's numbers in a folder of float32 safetensors, without a tokenizer."""
    from paceline.models.files.fetch import resolve
    from paceline.models.files.open import open_checkpoint
    from tests.torch.gguf_reference import transformers_model

    transformers_model(open_checkpoint(resolve(model, None, None))).save_pretrained(folder)


def generated_per_s(folder: Path, quantization: str, clients: int) -> float:
    """Output tokens a second of `clients` prompts that are answered together."""
    from paceline import LLM, SamplingParams

    llm = LLM(
        str(folder),
        device="cpu",
        quantization=quantization,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(clients)]
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompts[0]}], sampling, use_tqdm=False)
    started_s = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return clients * OUTPUT_TOKENS / (time.perf_counter() - started_s)


@bench.part(
    MODEL_FLAG,
    flag("--clients", 8, "prompts that are answered together"),
    flag("--rounds", 3, "of each kind"),
)
def quantized(given: Given) -> Found:
    """Output tokens per second by the kind of weights."""
    with tempfile.TemporaryDirectory() as made:
        write_folder(given.model, Path(made))
        kinds = ("auto", "int8", "int4")
        works = {kind: partial(generated_per_s, Path(made), kind, given.clients) for kind in kinds}
        taken = in_turns(works, given.rounds)
    speeds = {kind: round(statistics.median(taken[kind]), 1) for kind in kinds}
    table("weights", "tok/s", "against float32")
    for kind, name in zip(kinds, ("float32", "int8", "int4"), strict=True):
        row(name, speeds[kind], round(speeds[kind] / speeds["auto"], 2))
    return {"clients": given.clients, "tok_s": speeds, "runs": taken}


# -- memory --------------------------------------------------------------------------------------------------


@bench.part(MODEL_FLAG, flag("--tokens", 4096, "to cache, in prompts of 1,024"))
def memory(given: Given) -> Found:
    """Anonymous bytes after loading and with tokens in the prefix cache."""
    from paceline import LLM, SamplingParams

    llm = LLM(given.model, max_num_batched_tokens=64, max_model_len=2048)
    vocabulary = llm.loaded.checkpoint.spec.vocab_size
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    found = {0: _anonymous_mb()}
    for number in range(given.tokens // 1024):
        prompt = [(7 * place + 31 * number + 1) % vocabulary for place in range(1020)]
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        found[(number + 1) * 1024] = _anonymous_mb()
    table("tokens cached", "anonymous MB")
    for tokens, megabytes in found.items():
        row(tokens, megabytes)
    return {"anonymous_mb_by_tokens": found}


def _anonymous_mb() -> float:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


# -- a server without requests, and one long prompt -----------------------------------------------------------


@bench.part(MODEL_FLAG, flag("--seconds", 60, "without a request"))
def idle(given: Given) -> Found:
    """Processor time of both processes of a server without requests."""
    with served([given.model] if given.model else []) as server:
        Client(server).complete(PROMPT, OUTPUT)
        time.sleep(SETTLE_S)
        processes = [server.pid, *children(server.pid)]
        before_s = sum(map(_processor_s, processes))
        time.sleep(given.seconds)
        share = (sum(map(_processor_s, processes)) - before_s) / given.seconds
    table("processes", "seconds", "share of a core")
    row(len(processes), given.seconds, f"{share:.2%}")
    return {"processes": len(processes), "seconds": given.seconds, "share_of_a_core": round(share, 5)}


def _processor_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@bench.part(MODEL_FLAG, flag("--tokens", 2000, "of the prompt"), flag("--rounds", 4))
def prompt(given: Given) -> Found:
    """A prompt alone, to its first token, by the engine in this process."""
    from paceline import LLM, SamplingParams

    llm = LLM(given.model, enable_prefix_caching=False, max_model_len=given.tokens + 16)
    rng, sampling = random.Random(0), SamplingParams(max_tokens=1, temperature=0.0)
    took_s = []
    for _ in range(given.rounds):
        ids = [rng.randrange(100, 4000) for _ in range(given.tokens)]
        started_s = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        took_s.append(time.perf_counter() - started_s)
    speed = round(given.tokens / statistics.median(took_s), 1)
    table("tokens", "median s", "tok/s")
    row(given.tokens, round(statistics.median(took_s), 2), speed)
    return {"tokens": given.tokens, "all_s": [round(one, 3) for one in took_s], "tokens_per_s": speed}


# -- a busy machine ------------------------------------------------------------------------------------------

PROMPT, OUTPUT, LONG_PROMPT, LARGE_STEP = 200, 40, 801, 256
SETTLE_S, MOST_S = 3.0, 60.0
NEARLY = 0.75  # of the sizes on the quiet machine: two starts there differ by a tenth
BUSY = "the machine is busy"
# Ends with the program that started it, however that ends.
LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy_loops() -> Iterator[Callable[[], None]]:
    """One busy loop for each core, until the block ends or the function it gives is called."""
    cores = sorted(os.sched_getaffinity(0))
    running = [subprocess.Popen([sys.executable, "-c", LOOP, str(core)]) for core in cores]

    def stop() -> None:
        for one in running:
            one.kill()
            one.wait()
        running.clear()

    try:
        time.sleep(SETTLE_S)
        yield stop
    finally:
        stop()


class Client:
    """Sends prompts of made-up tokens, none like another."""

    def __init__(self, server: Server) -> None:
        self._server, self._rng = server, random.Random(0)
        self._model = server.read("/v1/models")["data"][0]["id"]

    def complete(self, prompt: int, output: int) -> tuple[int, float]:
        """Status and seconds of one request."""
        ids = [self._rng.randrange(100, 4000) for _ in range(prompt)]
        body = {"model": self._model, "prompt": ids, "max_tokens": output, **GREEDY}
        started_s = time.perf_counter()
        status, answer = self._server.call("/v1/completions", body)
        if status not in (200, 503):
            raise SystemExit(f"the server answered {status}: {answer[:500].decode(errors='replace')}")
        return status, time.perf_counter() - started_s

    def budget(self) -> tuple[int, int]:
        """Tokens of a step beside decoding rows, and of one without any."""
        limits = self._server.read("/v1/admin/dial")["limits"]
        return limits["max_step_tokens"], limits["max_prompt_tokens"]

    def several(self, runs: int, prompt: int = PROMPT, output: int = OUTPUT) -> Found:
        """Seconds of some requests one after the other, and the size of steps after them."""
        answers = [self.complete(prompt, output) for _ in range(runs)]
        return {
            "median_s": round(statistics.median(took_s for _, took_s in answers), 3),
            "all_s": [round(took_s, 3) for _, took_s in answers],
            "answers_503": sum(status == 503 for status, _ in answers),
            "budget": self.budget(),
        }

    def back_after(self, wanted: tuple[int, int]) -> float | None:
        """Seconds until steps are about this large again, with a small request now and then; None: over a minute."""
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < MOST_S:
            self.complete(64, 2)
            if all(size >= NEARLY * before for size, before in zip(self.budget(), wanted, strict=True)):
                return round(time.perf_counter() - started_s, 1)
            time.sleep(0.5)
        return None


@bench.part(MODEL_FLAG, flag("--runs", 5, "requests of each kind"))
def busy(given: Given) -> Found:
    """A server whose cores other processes use, beside the same server on the quiet machine."""
    options = [*([given.model] if given.model else []), "--device", "cpu", "--no-enable-prefix-caching"]
    runs, found = given.runs, Found()
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        with served(options, log) as server:
            client = Client(server)
            client.complete(PROMPT, OUTPUT)  # the first one pays for memory and threads
            quiet = found["quiet"] = client.several(runs)
            with busy_loops():
                found["busy"] = client.several(runs)
            found["budget_back_s"] = client.back_after(quiet["budget"])
            found["quiet_again"] = client.several(runs)
        found["log_says_busy"] = BUSY in log.read_text()
        with busy_loops() as stop, served(options, log) as server:
            client = Client(server)
            found["card_says_busy"] = BUSY in log.read_text()
            found["started_busy"] = client.several(runs)
            stop()
            found["started_busy_budget_back_s"] = client.back_after(quiet["budget"])
            found["started_busy_budget"] = client.budget()
        with busy_loops(), served([*options, "--max-num-batched-tokens", str(LARGE_STEP)]) as server:
            long = found["long_prompt"] = Client(server).several(runs, LONG_PROMPT, 1)
    table("", "median s", "of quiet", "503", "tokens of a step")
    for kind in ("quiet", "busy", "started_busy", "quiet_again"):
        own = found[kind]
        slowdown = round(own["median_s"] / quiet["median_s"], 2)
        row(kind, own["median_s"], slowdown, own["answers_503"], own["budget"])
        found[f"slowdown_{kind}"] = slowdown
    row(f"{LONG_PROMPT} tokens, busy", long["median_s"], "", long["answers_503"], long["budget"])
    found["slowdown"] = found["slowdown_busy"]
    return found


if __name__ == "__main__":
    bench.main()
