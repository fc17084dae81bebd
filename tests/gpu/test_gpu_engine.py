"""Whole engines on the card: greedy tokens against transformers, and the same bytes however steps are run.

Tokens are equal to those of the float32 reference, or first differ where its two best logits are closer than what
bfloat16 can tell apart. Steps launched one by one, replayed from graphs and planned one or two ahead give the same
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CLOSE = 2e-2  # two logits that bfloat16 may swap
CLOSE_EXPERTS = 5e-2  # and where the shares of a token's experts are rounded before they are added
NUM_NEW = 24
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.05,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _gemma3() -> Any:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(
        **SIZES | {"head_dim": 64, "sliding_window": 100, "layer_types": kinds, "query_pre_attn_scalar": 64}
    )


def _llama3() -> dict[str, Any]:
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _rope("llama3", **factors, original_max_position_embeddings=64)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-mha": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama-llama3": lambda: transformers.LlamaConfig(**SIZES, **_llama3()),
    "llama-yarn": lambda: transformers.LlamaConfig(
        **SIZES, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=90),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=128),
    "gemma3": _gemma3,
    "phi3": lambda: transformers.Phi3Config(**SIZES, partial_rotary_factor=0.5),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
}
SHARED = [7 + index % 400 for index in range(130)]
PROMPTS = [
    [5],
    [9, 8, 7, 6, 5],
    *([(11 * index * step) % 500 + 3 for index in range(1, 40 + 23 * step)] for step in range(1, 8)),
    [*SHARED, 41, 42],
    [*SHARED, 51],
]


SHARING = [[*SHARED, *range(100, 130), 300 + index, *range(5, 9 + 3 * index)] for index in range(12)]


@cache
def saved(name: str) -> tuple[str, Any]:
    """A folder with a random model, and the model."""
    torch.manual_seed(list(CONFIGS).index(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if key.endswith("mlp.gate.weight"):
                parameter.mul_(20.0)  # tokens know their experts well: no choice hangs on a rounding
        model.get_output_embeddings().weight.mul_(
            0.2
        )  # logits near 1: bfloat16 tells them apart by a hundredth
        model.bfloat16().float()  # the reference has the very weights the card gets
    folder = mkdtemp()
    model.save_pretrained(folder)
    return folder, model.float().eval()


@cache
def reference(name: str, shared: bool = False) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of each prompt, and how far apart the two best logits were."""
    model, found = saved(name)[1], []
    with torch.inference_mode():
        for prompt in SHARING if shared else PROMPTS:
            read, past = torch.tensor([prompt]), None
            tokens: list[int] = []
            gaps: list[float] = []
            while len(tokens) < NUM_NEW:
                result = model(read, past_key_values=past, use_cache=True)
                past = result.past_key_values
                best = result.logits[0, -1].float().topk(2)
                tokens.append(int(best.indices[0]))
                gaps.append(float(best.values[0] - best.values[1]))
                read = torch.tensor([[tokens[-1]]])
            found.append((tokens, gaps))
    return found


def generate(name: str, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    sizes = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28, "dtype": "bfloat16"}
    llm = LLM(saved(name)[0], skip_tokenizer_init=True, **sizes | options)
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    try:
        outputs = llm.generate(list(prompts), greedy, use_tqdm=False)
        assert llm.loaded.engine.last_error is None, repr(llm.loaded.engine.last_error)
    finally:
        del llm
    return [output.outputs[0].token_ids for output in outputs]


def assert_close(
    name: str, found: list[list[int]], *, shared: bool = False, close: float | None = None
) -> None:
    right = reference(name, shared)
    for prompt, tokens, (expected, gaps) in zip(SHARING if shared else PROMPTS, found, right, strict=True):
        assert len(tokens) == NUM_NEW
        for index, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
            if token != wanted:
                place = f"{name}, prompt of {len(prompt)}, token {index}"
                own = CLOSE_EXPERTS if "mix" in name or "moe" in name else CLOSE
                assert gaps[index] < (own if close is None else close), (
                    f"{place}: {token} is not {wanted}, {gaps[index]} ahead"
                )
                break


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    assert_close(name, generate(name))


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


def test_swapped_blocks_come_back(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_blocks": 11, "num_host_blocks": 32, "preemption": "swap"}
    assert_close("qwen3", generate("qwen3", **options))


@pytest.mark.parametrize("eager", [False, True])
def test_a_shared_beginning_is_computed_once(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.runner.gpu.rows as rows

    monkeypatch.setattr(rows, "SHORTEST_SHARED", 128)
    monkeypatch.setattr(rows, "LEAST_SPARED", 0)
    found: list[tuple[int, int]] = []
    find = rows.HostRows._find_sharing

    def noted(self: Any, decoding: Any) -> Any:
        group, length = find(self, decoding)
        found.append((len(group), length))
        return group, length

    monkeypatch.setattr(rows.HostRows, "_find_sharing", noted)
    assert_close("qwen3", generate("qwen3", SHARING, enforce_eager=eager), shared=True)
    assert max(found) == (12, 128)


def test_what_lies_in_unused_blocks_changes_nothing() -> None:
    plain = generate("qwen3")
    sizes = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28, "dtype": "bfloat16"}
    llm = LLM(saved("qwen3")[0], skip_tokenizer_init=True, **sizes)
    runner: Any = llm.loaded.engine._runner
    for layer in runner._pools.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == plain


def test_draws_depend_on_the_seed_alone() -> None:
    llm = LLM(saved("qwen3")[0], skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, dtype="bfloat16",
              kv_cache_memory_bytes=1 << 28)  # fmt: skip
    drawn = SamplingParams(max_tokens=8, temperature=0.9, seed=5, ignore_eos=True)
    rich = SamplingParams(max_tokens=8, temperature=0.9, seed=5, ignore_eos=True, top_k=20, top_p=0.9,
                          frequency_penalty=0.3, logit_bias={7: 2.0}, logprobs=2)  # fmt: skip
    alone = [llm.generate([prompt], drawn, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS[:3]]
    ruled = [llm.generate([prompt], rich, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS[:3]]
    mixed = llm.generate([*PROMPTS[:3], *PROMPTS[:3]], [drawn] * 3 + [rich] * 3, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in mixed]
    assert all(len(one) == 8 for one in tokens)
    # Alone and together products may differ in their last bit, which seldom moves a draw.
    assert sum(one == two for one, two in zip(tokens, alone + ruled, strict=True)) >= 5
    assert mixed[4].outputs[0].logprobs is not None and len(mixed[4].outputs[0].logprobs) == 8


def test_nothing_is_compiled_while_serving() -> None:
    from paceline.runner.gpu.compile import late_compilations

    llm = LLM(saved("qwen3")[0], skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, dtype="bfloat16",
              kv_cache_memory_bytes=1 << 28)  # fmt: skip
    before = len(late_compilations)
    kinds = [
        SamplingParams(max_tokens=6, temperature=0.7, seed=1, ignore_eos=True),
        SamplingParams(
            max_tokens=6, temperature=0.7, seed=1, top_p=0.9, presence_penalty=0.2, ignore_eos=True
        ),
        SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.9, seed=2, n=3, ignore_eos=True),
    ]
    for params in kinds:
        llm.generate(PROMPTS, params, use_tqdm=False)
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert late_compilations[before:] == []


def test_stop_ids_end_a_row_on_the_device() -> None:
    first = generate("llama")[3]
    llm = LLM(saved("llama")[0], skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, dtype="bfloat16",
              kv_cache_memory_bytes=1 << 28)  # fmt: skip
    stop = first[6]
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    output = llm.generate(PROMPTS, params, use_tqdm=False)[3].outputs[0]
    assert output.token_ids == first[: first.index(stop) + 1] and output.finish_reason == "stop"
