"""What must hold of an engine on the card beside its tokens.

Its logits are as good as transformers' own in bfloat16, a step is submitted without waiting for the device, blocks may
lie beyond what 32 bits can address, and no kernel is compiled once requests are served.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from paceline import LLM, SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.engine_cases import (
    ENGINE,
    MIXTURES,
    NAMES,
    PROMPTS,
    engine,
    exact,
    log_probabilities,
    opened,
    predicted,
    save_wide,
    saved,
    tokens_of,
)
from tests.torch.tiny_models import CARD

STEP = 4e-3  # between two numbers of bfloat16 near 1, where the logits are
SUBMIT = "paceline.submit"
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
# One of each kind the device samples, ending at different times, so that others join while some decode.
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "seed": 3, "presence_penalty": 0.4, "logit_bias": {9: 1.0}, "min_tokens": 3},
    {"temperature": 0.7, "seed": 4, "logprobs": 20},
    {"temperature": 0.7, "seed": 5, "logprobs": 1, "top_k": 30},
)
MIXED = [
    SamplingParams(max_tokens=4 + 3 * index, ignore_eos=True, **KINDS[index % len(KINDS)])
    for index in range(len(PROMPTS))
]


# -- logits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_as_good_as_those_of_transformers(name: str) -> None:
    """Held against float32. Of mixtures the middle token counts: some may take another expert they like as much."""
    prompts = [PROMPTS[1], PROMPTS[2], PROMPTS[5], PROMPTS[8]]
    asked = SamplingParams(max_tokens=12, temperature=0.0, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    with engine(name, enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, asked, use_tqdm=False)
    theirs = opened(name, torch.bfloat16).to("cuda")
    errors: list[Tensor] = []
    their_errors: list[Tensor] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids]
        right = predicted(exact(name), tokens, "cpu")
        errors.append((log_probabilities(output, CARD.vocab) - right).abs())
        their_errors.append((predicted(theirs, tokens, "cuda") - right).abs())
    ours, expected = torch.cat(errors).amax(1), torch.cat(their_errors).amax(1)  # the worst of each token
    middle, their_middle = float(ours.median()), float(expected.median())
    most, their_most = float(ours.max()), float(expected.max())
    print(
        f"{name}: middle token {middle:.2g} (theirs {their_middle:.2g}), worst {most:.2g} ({their_most:.2g})"
    )
    assert middle <= 1.5 * their_middle + STEP / 4
    if name not in MIXTURES:
        assert most <= 2 * their_most + STEP


# -- nothing waits -----------------------------------------------------------------------------------------------


def put_around_submit(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, guard: Callable[[], AbstractContextManager[object]]
) -> list[int]:
    """Every step from now on is submitted inside `guard`; counts those with decoding rows alone, and with prompts."""
    runner: Any = llm.loaded.engine._runner
    submit, seen = runner.submit, [0, 0]

    def guarded(plan: Any) -> Any:
        seen[bool(len(plan.spans.row))] += 1
        with guard():
            return submit(plan)

    monkeypatch.setattr(runner, "submit", guarded)
    return seen


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_submitting_a_step_waits_for_nothing(name: str, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []

    @contextmanager
    def forbidding() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            failures.append(str(error))
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with engine(name, max_num_seqs=4, max_num_batched_tokens=64, enforce_eager=eager) as llm:
        expected = tokens_of(llm, PROMPTS, MIXED)
        llm.reset_prefix_cache()
        seen = put_around_submit(llm, monkeypatch, forbidding)
        found = tokens_of(llm, PROMPTS, MIXED)
    assert failures == []
    assert min(seen) > 10
    assert found == expected


def test_no_call_inside_submit_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by what the driver saw, whatever called it."""
    with engine("qwen3", max_num_seqs=4, max_num_batched_tokens=64) as llm:
        tokens_of(llm, PROMPTS, MIXED)
        llm.reset_prefix_cache()
        seen = put_around_submit(llm, monkeypatch, lambda: record_function(SUBMIT))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            tokens_of(llm, PROMPTS, MIXED)
            torch.cuda.synchronize()
    events = [event for event in recorded.events() or [] if str(event.device_type).endswith("CPU")]
    calls = [event for event in events if event.name.startswith("cuda")]
    if not any(event.name in WAITS for event in calls):  # at least the one above must be there
        pytest.skip("the profiler sees no calls of the driver here")
    spans = [(event.time_range.start, event.time_range.end) for event in events if event.name == SUBMIT]
    assert len(spans) == sum(seen)
    waiting = [
        event.name
        for event in calls
        if event.name in WAITS and any(start <= event.time_range.start <= end for start, end in spans)
    ]
    assert waiting == []


# -- far blocks --------------------------------------------------------------------------------------------------


def test_blocks_beyond_two_to_the_31_elements(tmp_path: Path) -> None:
    per_block = save_wide(tmp_path)
    # Without a reserve, which is a share of all blocks: both pools must admit the same requests at the same time.
    options = ENGINE | {"enable_prefix_caching": False, "watermark": 0.0}
    near = LLM(str(tmp_path), **options | {"num_blocks": 64})
    expected = tokens_of(near, PROMPTS)
    del near

    first_far = 2**31 // per_block
    llm = LLM(str(tmp_path), **options | {"num_blocks": first_far + 64})
    runner: Any = llm.loaded.engine._runner
    layers = runner._pools.layers
    assert layers[0].keys[:first_far].numel() == 2**31
    for layer in layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    pool = llm.loaded.engine.scheduler.state.kv.groups[0].pool
    held = pool.allocate(first_far - 1)  # the lowest come first; the null block is not used
    assert int(held.max()) == first_far - 1
    assert tokens_of(llm, PROMPTS) == expected
    assert llm.loaded.engine.last_error is None
    table = runner._rows.memory["table0"].host
    used = np.unique(table[table > 0])
    assert len(used) > 20 and int(used.min()) >= first_far
    blocks = torch.from_numpy(used).long().cuda()
    for layer in layers:
        for part in (layer.keys, layer.values):
            assert bool(part[1:first_far].isnan().all())  # nothing came back around to the low ones
            assert bool(part[blocks].isfinite().flatten(1).any(1).all())
    del llm, runner, layers, layer, part
    torch.cuda.empty_cache()


# -- nothing is compiled -----------------------------------------------------------------------------------------

# In a separate process: kernels that an engine before has compiled would not be missed.
SERVE = """
import json, sys
from paceline import LLM, SamplingParams
from paceline.runner.gpu.compile import late_compilations
folder, options, prompts, kinds = json.loads(sys.stdin.read())
llm = LLM(folder, **options)
for kind in kinds:
    params = SamplingParams(max_tokens=6, ignore_eos=True, **kind)
    llm.generate(prompts, params, use_tqdm=False)
    llm.generate(prompts[:1], params, use_tqdm=False)
print(json.dumps([repr(llm.loaded.engine.last_error), late_compilations]))
"""


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_nothing_is_compiled_while_serving(name: str) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.7, "seed": 1, "top_p": 0.9, "presence_penalty": 0.2},
        {"temperature": 0.7, "seed": 1, "top_k": 5, "min_p": 0.1, "min_tokens": 2},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.9, "seed": 2, "n": 3},
    ]
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        input=json.dumps([saved(name), ENGINE, PROMPTS, kinds]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["src", *sys.path]))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["None", []]
