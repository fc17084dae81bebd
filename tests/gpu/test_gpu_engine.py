"""Whole engines on the card: greedy tokens against transformers, and the same bytes however steps are run.

Tokens are equal to those of the float32 reference, or first differ where its two best logits are closer than what
bfloat16 can tell apart. Steps launched one by one, replayed from graphs and planned one or two ahead give the same
bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.engine_cases import (
    GREEDY,
    MIXTURES,
    NAMES,
    PROMPTS,
    SHARING,
    engine,
    first_gaps,
    generate,
    reference,
    tokens_of,
)

CLOSE = 2e-2  # two logits that bfloat16 may swap


def assert_close(name: str, found: list[list[int]], *, shared: bool = False, close: float = CLOSE) -> None:
    gaps = first_gaps(found, reference(name, shared))
    print(
        f"{name}: {len(gaps)} of {len(found)} differ, the logits there at most {max(gaps, default=0.0):.2g} apart"
    )
    assert max(gaps, default=0.0) < close


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    assert_close(name, generate(name))


@pytest.mark.parametrize("name", MIXTURES)
def test_few_choices_of_experts_hang_on_a_rounding(name: str) -> None:
    """Else the comparison above would say little."""
    gaps = [gap for _, apart in reference(name) for gap in apart]
    assert sum(gap == 0 for gap in gaps) < 0.15 * len(gaps)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral"])
def test_how_steps_are_run_changes_no_byte(name: str) -> None:
    # A shared beginning would be waited for, one step longer for each step planned ahead: another batch, other bits.
    prompts = PROMPTS[:-2]
    graphs = generate(name, prompts, depth=1)
    assert generate(name, prompts, depth=1, enforce_eager=True) == graphs
    assert generate(name, prompts, depth=0) == graphs
    assert generate(name, prompts, depth=2) == graphs


@pytest.mark.parametrize("budget", [17, 64])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_chunks_and_preemption_stay_close(name: str, budget: int) -> None:
    # 11 blocks of 64 for sequences of up to 215 tokens: not all fit at once
    assert_close(name, generate(name, max_num_batched_tokens=budget, num_blocks=11))


def test_swapped_blocks_come_back() -> None:
    options: dict[str, Any] = {"num_blocks": 11, "num_host_blocks": 32, "preemption": "swap"}
    assert_close("qwen3", generate("qwen3", **options))


@pytest.mark.parametrize(
    "params", [GREEDY, replace(GREEDY, min_tokens=1, logprobs=3)], ids=["plain", "rules"]
)
@pytest.mark.parametrize("eager", [False, True])
def test_shared_beginnings_are_computed_once(
    eager: bool, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules that change nothing: such steps draw in a graph of their own."""
    import paceline.runner.gpu.host_rows as rows

    monkeypatch.setattr(rows, "SHORTEST_SHARED", 128)
    monkeypatch.setattr(rows, "LEAST_SPARED", 0)
    found: list[list[tuple[int, int]]] = []
    find = rows.HostRows._find_sharing

    def noted(self: Any, decoding: Any) -> Any:
        groups = find(self, decoding)
        found.append([(len(group.rows), group.length) for group in groups])
        return groups

    monkeypatch.setattr(rows.HostRows, "_find_sharing", noted)
    with engine("qwen3", enforce_eager=eager) as llm:
        assert_close("qwen3", tokens_of(llm, SHARING, params), shared=True)
    assert [(6, 128), (6, 128)] in found


def test_what_lies_in_unused_blocks_changes_nothing() -> None:
    plain = generate("qwen3")
    with engine("qwen3") as llm:
        runner: Any = llm.loaded.engine._runner
        for layer in runner._pools.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        assert tokens_of(llm, PROMPTS) == plain


def test_draws_depend_on_the_seed_alone() -> None:
    drawn = SamplingParams(max_tokens=8, temperature=0.9, seed=5, ignore_eos=True)
    rich = SamplingParams(max_tokens=8, temperature=0.9, seed=5, ignore_eos=True, top_k=20, top_p=0.9,
                          frequency_penalty=0.3, logit_bias={7: 2.0}, logprobs=2)  # fmt: skip
    with engine("qwen3") as llm:
        alone = [tokens_of(llm, [prompt], drawn)[0] for prompt in PROMPTS[:3]]
        ruled = [tokens_of(llm, [prompt], rich)[0] for prompt in PROMPTS[:3]]
        mixed = llm.generate([*PROMPTS[:3], *PROMPTS[:3]], [drawn] * 3 + [rich] * 3, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in mixed]
    assert all(len(one) == 8 for one in tokens)
    # Alone and together products may differ in their last bit, which seldom moves a draw.
    assert sum(one == two for one, two in zip(tokens, alone + ruled, strict=True)) >= 5
    assert mixed[4].outputs[0].logprobs is not None and len(mixed[4].outputs[0].logprobs) == 8


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logprobs_of_the_device_are_those_of_the_host(top_p: float) -> None:
    """The host makes those of the whole vocabulary. With top-p logits are changed after they are asked about."""
    asked = SamplingParams(max_tokens=12, temperature=0.7, top_p=top_p, seed=3, ignore_eos=True, logprobs=20)
    with engine("qwen3") as llm:
        device = llm.generate(PROMPTS[:6], asked, use_tqdm=False)
        host = llm.generate(PROMPTS[:6], replace(asked, logprobs=-1), use_tqdm=False)
    compared = 0
    for one, two in zip(device, host, strict=True):
        ours, theirs = one.outputs[0], two.outputs[0]
        assert ours.logprobs is not None and theirs.logprobs is not None and len(ours.logprobs) == 12
        for token, other, entry, whole in zip(
            ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True
        ):
            if token != other:
                break  # a draw that a last bit has moved: what follows is another text
            compared += 1
            assert 20 <= len(entry) <= 21 and token in entry
            for each, told in entry.items():
                assert told.logprob == pytest.approx(whole[each].logprob, abs=CLOSE)
            likeliest = sorted((told.logprob for told in whole.values()), reverse=True)[:20]
            found = sorted((told.logprob for told in entry.values()), reverse=True)[:20]
            assert found == pytest.approx(likeliest, abs=CLOSE)
    assert compared >= 36


def test_stop_ids_end_a_row_on_the_device() -> None:
    first = generate("llama")[3]
    stop = first[6]
    params = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    with engine("llama") as llm:
        output = llm.generate(PROMPTS, params, use_tqdm=False)[3].outputs[0]
    assert output.token_ids == first[: first.index(stop) + 1] and output.finish_reason == "stop"
