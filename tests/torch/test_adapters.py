"""Adapters: greedy tokens equal those of transformers with the adapter merged into its weights, whatever else runs."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline import LLM, AsyncLLM, LoRARequest, RequestOutput, SamplingParams
from paceline.errors import ConfigError, InvalidAdapter, InvalidRequest
from paceline.models.adapters import AdapterTables
from paceline.models.files.adapter_files import open_adapter
from paceline.models.files.hf_config import spec_from_config
from paceline.models.spec import ModelSpec
from tests.adapter_folders import ALL_SEVEN, PREFIX, Arrays, adapter_arrays, merged, write_adapter
from tests.torch.llm_helpers import is_at_rest
from tests.torch.parity import Reference, greedy_reference
from tests.torch.tiny_models import VOCAB, save

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
NUM_NEW = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "num_blocks": 96,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "check_every": 1,
    "kv_cache_memory_bytes": 1 << 24,
}
CLEAR = 1e-4  # between the two best logits: what is closer may fall either way


def prompts(count: int = 3, length: int = 37) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, VOCAB, length + 5 * index).tolist() for index in range(count)]


@dataclass(frozen=True)
class Made:
    """A model, its adapters, and what transformers makes of each with each prompt; the first has no adapter."""

    folder: Path
    adapters: list[LoRARequest | None]
    references: list[list[Reference]]


def merged_into(model: Any, arrays: Arrays, scale: float) -> Any:
    """A copy of a model with an adapter's products added to its weights."""
    changed = copy.deepcopy(model)
    weights = {name: each.numpy() for name, each in model.state_dict().items()}
    changed.load_state_dict({n: torch.from_numpy(w) for n, w in merged(weights, arrays, scale).items()})
    return changed


def make(name: str, root: Path) -> Made:
    folder = root / "model"
    model = save(name, folder)
    spec: ModelSpec = spec_from_config(model.config.to_dict(), "config")
    every = FUSED if name == "phi3" else ("q_proj", "v_proj", "o_proj") if spec.experts else ALL_SEVEN
    few = FUSED[:2] if name == "phi3" else ("q_proj", "v_proj")
    models: list[Any] = [model]
    adapters: list[LoRARequest | None] = [None]
    for number, (targets, rank, rslora) in enumerate(
        [(few, 4, False), (every, 8, False), (every, 16, True)], 1
    ):
        arrays = adapter_arrays(spec, targets, rank, seed=number, size=0.1)
        path = write_adapter(root / f"a{number}", arrays, rank=rank, targets=targets, use_rslora=rslora)
        adapters.append(LoRARequest(f"a{number}", number, str(path)))
        models.append(merged_into(model, arrays, 8 / (rank**0.5 if rslora else rank)))
    references = [[greedy_reference(each, prompt, NUM_NEW) for prompt in prompts()] for each in models]
    outputs = {tuple(each.output for each in of_model) for of_model in references}
    assert len(outputs) == len(models), "an adapter that changes nothing proves nothing"
    return Made(folder, adapters, references)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shared(llama: Made) -> LLM:
    return LLM(str(llama.folder), **OPTIONS)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    shared.reset_prefix_cache()
    yield shared
    assert is_at_rest(shared.loaded.engine), "a test left something in the engine"


def check(output: RequestOutput, reference: Reference) -> None:
    tokens = tuple(output.outputs[0].token_ids)
    clear = next((at for at, gap in enumerate(reference.gaps) if gap < CLEAR), len(reference.gaps))
    assert clear > 2, "the reference itself is undecided"
    assert tokens[:clear] == reference.output[:clear]


def ask(llm: LLM, pairs: Sequence[tuple[int, int]], made: Made, **more: Any) -> list[RequestOutput]:
    """One batch of (adapter, prompt); every answer is checked."""
    outputs = llm.generate(
        [prompts()[prompt] for _, prompt in pairs],
        GREEDY,
        use_tqdm=False,
        lora_request=[made.adapters[adapter] for adapter, _ in pairs],
        **more,
    )
    for (adapter, prompt), output in zip(pairs, outputs, strict=True):
        check(output, made.references[adapter][prompt])
    return outputs


EVERY = [(adapter, prompt) for prompt in range(3) for adapter in range(4)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "mixtral"])
def test_tokens_equal_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    made = make(name, tmp_path)
    for backend in ("native", "torch"):
        llm = LLM(str(made.folder), **OPTIONS, cpu_backend=backend)
        for pair in EVERY[:6]:
            ask(llm, [pair], made)
        llm.reset_prefix_cache()
        ask(llm, EVERY, made)


def taught(model: Any, arrays: Arrays, scale: float, text: list[int]) -> Arrays:
    """An adapter trained for a moment to say a text."""
    tensors = {name: torch.tensor(each, requires_grad=True) for name, each in arrays.items()}
    optimizer = torch.optim.Adam(tensors.values(), lr=0.02)
    ids = torch.tensor([text])
    for _ in range(60):
        weights = dict(model.named_parameters())
        for name, b in tensors.items():
            if "lora_B" in name:
                whole = name.removeprefix(PREFIX).replace("lora_B.weight", "weight")
                weights[whole] = (
                    weights[whole].detach() + scale * b @ tensors[name.replace("lora_B", "lora_A")]
                )
        logits = torch.func.functional_call(model, weights, (ids,)).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: each.detach().numpy() for name, each in tensors.items()}


def test_an_adapter_says_what_it_was_taught(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    spec = spec_from_config(model.config.to_dict(), "config")
    prompt, answer = prompts()[0][:6], [11, 47, 5, 99, 23, 8, 64, 31]
    start = adapter_arrays(spec, rank=8, seed=4, size=0.0)  # B begins with zeros, as in PEFT
    arrays = taught(model, start, 1.0, prompt + answer)
    folder = write_adapter(tmp_path / "taught", arrays, rank=8)
    llm = LLM(str(tmp_path / "model"), **OPTIONS)
    sampling = SamplingParams(temperature=0, max_tokens=len(answer))
    chosen = [LoRARequest("taught", 1, str(folder)), None]
    taught_to, plain = llm.generate([prompt, prompt], sampling, use_tqdm=False, lora_request=chosen)
    assert taught_to.outputs[0].token_ids == answer != plain.outputs[0].token_ids


def test_alone_and_beside_others_every_token_is_the_same(llm: LLM, llama: Made) -> None:
    alone = [ask(llm, [pair], llama)[0] for pair in EVERY]
    llm.reset_prefix_cache()
    together = ask(llm, EVERY, llama)
    assert [each.outputs[0].token_ids for each in alone] == [each.outputs[0].token_ids for each in together]


def test_in_chunks_and_preempted(llama: Made) -> None:
    tight = OPTIONS | {"max_num_batched_tokens": 13, "num_blocks": 14, "max_num_seqs": 8}
    llm = LLM(str(llama.folder), **tight)
    ask(llm, EVERY, llama)
    assert llm.loaded.engine.scheduler.state.counters.preempted > 0
    assert is_at_rest(llm.loaded.engine)


def test_a_prefix_is_hit_by_the_same_adapter_only(llm: LLM, llama: Made) -> None:
    for adapter in range(4):
        (first,) = ask(llm, [(adapter, 0)], llama)
        assert first.num_cached_tokens == 0, "another adapter's prefix was used"
    for adapter in range(4):
        (again,) = ask(llm, [(adapter, 0)], llama)
        assert again.num_cached_tokens == 32


def test_branches_have_the_adapter_of_their_request(llm: LLM, llama: Made) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=NUM_NEW, n=2)
    (output,) = llm.generate([prompts()[0]], sampling, use_tqdm=False, lora_request=llama.adapters[2])
    reference = llama.references[2][0].output
    assert [tuple(each.token_ids) for each in output.outputs] == [reference, reference]
    stream = llm.stream(prompts()[0], GREEDY, lora_request=llama.adapters[3])
    for output in stream:
        if len(output.outputs) == 1 and len(output.outputs[0].token_ids) >= 4:
            llm.fork(output.request_id, append=())
    assert [tuple(each.token_ids) for each in output.outputs] == [llama.references[3][0].output] * 2


def test_a_tree_has_an_adapter(llm: LLM, llama: Made) -> None:
    with llm.tree(prompts()[0], GREEDY, lora_request=llama.adapters[2]) as tree:
        tree.root.fork(2, append=())
        found = [tuple(branch.token_ids) for branch in tree.held()]
    assert found == [llama.references[2][0].output] * 2


def test_a_search_hands_its_adapter_to_its_tree(
    llm: LLM, llama: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tree(prompt: object, params: SamplingParams, *, lora_request: LoRARequest | None) -> None:
        raise LookupError(lora_request)

    monkeypatch.setattr(llm, "tree", tree)
    with pytest.raises(LookupError) as caught:
        llm.search("best_of", prompts()[0], GREEDY, n=2, lora_request=llama.adapters[3])
    assert caught.value.args == (llama.adapters[3],)


def test_a_folder_read_again_is_another_adapter(tmp_path: Path, llama: Made) -> None:
    llm = LLM(str(llama.folder), **OPTIONS)
    spec = llm.loaded.checkpoint.spec
    folder = write_adapter(tmp_path, adapter_arrays(spec, seed=1, size=0.1))
    before = llm.generate(
        [prompts()[0]], GREEDY, use_tqdm=False, lora_request=LoRARequest("a", 1, str(folder))
    )
    write_adapter(tmp_path, adapter_arrays(spec, seed=2, size=0.1))
    same = llm.generate([prompts()[0]], GREEDY, use_tqdm=False, lora_request=LoRARequest("a", 1, str(folder)))
    assert same[0].outputs[0].token_ids == before[0].outputs[0].token_ids, "it was not to be read again"
    again = LoRARequest("a", 1, str(folder), load_inplace=True)
    (after,) = llm.generate([prompts()[0]], GREEDY, use_tqdm=False, lora_request=again)
    assert after.num_cached_tokens == 0
    assert after.outputs[0].token_ids != before[0].outputs[0].token_ids
    (known,) = llm.loaded.engine.adapters.infos()
    assert (known.number, known.rank) == (2, 4)
    llm.generate([prompts()[0]], GREEDY, use_tqdm=False)  # a step: what was let go of is gone
    assert not llm.loaded.engine.adapters.is_leaving


def in_memory(number: int, arrays: Any, **config: Any) -> LoRARequest:
    named = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(ALL_SEVEN), **config}
    return LoRARequest(f"memory{number}", number, lora_tensors=arrays, peft_config=named)


@pytest.mark.parametrize("max_loras", [0, 1])
def test_an_adapter_in_memory_answers_as_its_folder_and_is_another(
    max_loras: int, tmp_path: Path, llama: Made
) -> None:
    llm = LLM(str(llama.folder), **OPTIONS, max_loras=max_loras)
    arrays = adapter_arrays(llm.loaded.checkpoint.spec, seed=1, size=0.1)
    folder = LoRARequest("folder", 1, str(write_adapter(tmp_path, arrays)))
    tensors: Any = {name: torch.from_numpy(values.copy()) for name, values in arrays.items()}
    given = in_memory(2, tensors)

    def answer(request: LoRARequest) -> RequestOutput:
        return llm.generate([prompts()[0]], GREEDY, use_tqdm=False, lora_request=request)[0]

    first = answer(folder)
    same = answer(given)
    assert same.outputs[0].token_ids == first.outputs[0].token_ids
    assert not same.num_cached_tokens, "the prefix of another adapter was hit"
    for values in tensors.values():
        values.zero_()  # a trainer goes on: what was published stays
    answer(folder)  # with one place, the published one has to come back
    again = answer(given)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids and again.num_cached_tokens
    replaced = answer(replace(in_memory(2, arrays), load_inplace=True))
    assert replaced.outputs[0].token_ids == first.outputs[0].token_ids
    assert not replaced.num_cached_tokens, "what was published again is another adapter"
    identities = [info.identity for info in llm.loaded.engine.adapters.infos()]
    assert len(set(identities)) == 2 and all(len(identity) == 64 for identity in identities)
    with pytest.raises(InvalidRequest, match="is the adapter of tensors in memory"):
        answer(LoRARequest("x", 2, str(tmp_path)))


def test_what_is_wrong_with_tensors_in_memory_is_said(llm: LLM) -> None:
    arrays = adapter_arrays(llm.loaded.checkpoint.spec)
    name = next(iter(arrays))
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({name: arrays[name][:, :-1]}, {}, rf"lora_tensors: the tensor {name} has the shape"),
        ({name: arrays[name] * np.nan}, {}, "not finite"),
        ({name: "text"}, {}, "is no array of numbers"),
        ({"strange": arrays[name]}, {}, "match no matrix of this model"),
        ({}, {"use_dora": True}, r"peft_config: DoRA"),
        ({}, {"r": 99}, "has rank 99, and --max-lora-rank is 16"),
    ]
    for changes, config, says in wrong:
        with pytest.raises(InvalidAdapter, match=says):
            llm.generate(
                [[5]], GREEDY, use_tqdm=False, lora_request=in_memory(9, {**arrays, **changes}, **config)
            )
    with pytest.raises(InvalidAdapter, match="lora_tensors: holds no tensor"):
        llm.generate([[5]], GREEDY, use_tqdm=False, lora_request=in_memory(9, {}))
    with pytest.raises(InvalidRequest, match="go together"):
        LoRARequest("x", 9, lora_tensors=arrays)
    with pytest.raises(InvalidRequest, match="not both"):
        LoRARequest("x", 9, "folder", lora_tensors=arrays, peft_config={})


def test_rows_keep_an_adapter_that_was_let_go_of(llm: LLM, llama: Made) -> None:
    engine = llm.loaded.engine
    info = engine.adapters.load("again", Path(llama.adapters[2].lora_path))  # type: ignore[union-attr]
    (request,) = engine.add(prompts()[0], GREEDY, adapter=info.number)
    tokens: list[int] = []
    for _ in range(200):
        tokens += [token for event in engine.step_overlapped().tokens for token in event.tokens.tolist()]
        if len(tokens) == 5:
            engine.unload_adapter(info.number)
            with pytest.raises(InvalidRequest, match="not loaded any more"):
                engine.add(prompts()[1], GREEDY, adapter=info.number)
        if request not in engine.scheduler.state.requests:
            break
    engine.drain()
    assert tuple(tokens) == llama.references[2][0].output
    assert engine.adapters.is_leaving
    engine.step()
    assert not engine.adapters.is_leaving


@pytest.mark.parametrize(
    "options", [{"mode": "static"}, {"mode": "dynamic"}, {"speculative_config": "ngram"}]
)
def test_in_padded_batches_and_with_drafts(llama: Made, options: dict[str, Any]) -> None:
    llm = LLM(str(llama.folder), **OPTIONS, **options)
    ask(llm, EVERY, llama)
    assert is_at_rest(llm.loaded.engine)


def test_a_tokens_numbers_are_the_same_bits_in_any_batch(llm: LLM, llama: Made) -> None:
    spec = llm.loaded.checkpoint.spec
    tables = AdapterTables(spec)
    for number, (targets, rank) in enumerate([(ALL_SEVEN, 16), (("q_proj", "v_proj"), 5)], 1):
        folder = llama.folder / f"bits{number}"
        arrays = adapter_arrays(spec, targets, rank, seed=number)
        tables.put(number, open_adapter(write_adapter(folder, arrays, rank=rank, targets=targets), spec, 16))
    x, own = torch.randn(70, 64), torch.randn(70, 128)
    numbers = np.random.default_rng(3).integers(0, 3, 70)

    def added(chosen: NDArray[np.int64]) -> torch.Tensor:
        out = own[chosen]
        tables.of_tokens(numbers[chosen]).add(1, "qkv", x[chosen], out)
        return out

    whole = added(np.arange(70))
    without = numbers == 0
    assert torch.equal(whole[without], own[without]) and not torch.equal(whole[~without], own[~without])
    for count in (1, 2, 3, 8, 17, 33, 69):
        chosen = np.random.default_rng(count).permutation(np.flatnonzero(~without))[:count]
        assert torch.equal(added(chosen), whole[chosen]), f"{count} tokens have other bits than all"


def test_a_storm_of_loads_and_unloads(llama: Made, tmp_path: Path) -> None:
    """Adapters come, go and are read again under new numbers while requests run: each gets its own one's tokens."""
    llm = LLM(str(llama.folder), **OPTIONS)
    engine, spec = llm.loaded.engine, llm.loaded.checkpoint.spec
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    folders = [write_adapter(tmp_path / f"{n}", adapter_arrays(spec, seed=n, size=0.2)) for n in range(6)]
    prompt = prompts()[0][:17]
    alone = []
    for number, folder in enumerate(folders, 1):
        request = LoRARequest(f"{number}", number, str(folder))
        (output,) = llm.generate([prompt], sampling, use_tqdm=False, lora_request=request)
        alone.append(list(output.outputs[0].token_ids))
        engine.unload_adapter(number)
    assert len({tuple(each) for each in alone}) > 4
    draw = random.Random(8)
    there: dict[int, int] = {}  # numbers and the folders they were read from
    asked: dict[int, int] = {}  # requests and the folders of their adapters
    said: dict[int, list[int]] = {}

    def step() -> None:
        for event in engine.step_overlapped().tokens:
            for request, token in zip(event.requests.tolist(), event.tokens.tolist(), strict=True):
                said.setdefault(request, []).append(token)

    for _ in range(300):
        what = draw.random()
        if what < 0.2 or not there:
            chosen = draw.randrange(len(folders))
            there[engine.adapters.load("x", folders[chosen]).number] = chosen
        elif what < 0.4:
            number = draw.choice(list(there))
            del there[number]
            engine.unload_adapter(number)
        elif what < 0.7:
            number = draw.choice(list(there))
            asked[engine.add(prompt, sampling, adapter=number)[0]] = there[number]
        else:
            step()
    while engine.has_requests:
        step()
    assert len(asked) > 60 and said == {request: alone[chosen] for request, chosen in asked.items()}
    for number in there:
        engine.unload_adapter(number)
    engine.drain()
    engine.step()
    assert not engine.adapters.is_leaving and not engine.adapters.infos()


def test_what_is_refused(llm: LLM, llama: Made, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match="is not a folder"):
        llm.generate([[5]], GREEDY, use_tqdm=False, lora_request=LoRARequest("x", 9, str(tmp_path / "none")))
    ask(llm, [(1, 0)], llama)
    with pytest.raises(InvalidRequest, match="give another number, or load_inplace"):
        llm.generate([[5]], GREEDY, use_tqdm=False, lora_request=LoRARequest("x", 1, str(tmp_path)))
    with pytest.raises(ConfigError, match="there is no adapter y"):
        llm.generate([[5]], GREEDY, use_tqdm=False, lora_request=LoRARequest("y", 8))
    with pytest.raises(ValueError, match="1 prompts and 2 adapters"):
        llm.generate([[5]], GREEDY, use_tqdm=False, lora_request=[None, None])
    with pytest.raises(InvalidRequest, match="must be a LoRARequest"):
        llm.generate([[5]], GREEDY, use_tqdm=False, lora_request=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="lora_int_id must be at least 1"):
        LoRARequest("x", 0)
    plain = LLM(str(llama.folder), **OPTIONS | {"enable_lora": False, "cpu_backend": "torch"})
    with pytest.raises(InvalidAdapter, match="started without adapters"):
        plain.generate([[5]], GREEDY, use_tqdm=False, lora_request=llama.adapters[1])


def test_an_async_engine_takes_adapters_too(llama: Made) -> None:
    async def ask_both() -> list[RequestOutput]:
        async with AsyncLLM(str(llama.folder), **OPTIONS) as llm:

            async def last(adapter: LoRARequest | None) -> RequestOutput:
                found = [each async for each in llm.generate(prompts()[0], GREEDY, lora_request=adapter)]
                return found[-1]

            with pytest.raises(InvalidAdapter, match="is not a folder"):
                await last(LoRARequest("x", 9, str(llama.folder / "none")))
            return await asyncio.gather(*map(last, llama.adapters))

    for adapter, output in enumerate(asyncio.run(ask_both())):
        check(output, llama.references[adapter][0])


def test_adapters_of_the_start(llama: Made, tmp_path: Path) -> None:
    folder = llama.adapters[3].lora_path  # type: ignore[union-attr]
    options = {**OPTIONS, "enable_lora": False}
    llm = LLM(str(llama.folder), **options, lora_modules=f"one={folder}, two={folder}")
    (output,) = llm.generate([prompts()[1]], GREEDY, use_tqdm=False, lora_request=LoRARequest("two", 2))
    check(output, llama.references[3][1])
    one, two = llm.loaded.engine.adapters.infos()
    assert (one.name, one.number, two.name, two.number) == ("one", 1, "two", 2)
    assert one.identity == two.identity
    assert llm.loaded.hardware.runner["name"] == "native"
    with pytest.raises(ConfigError, match="--lora-modules bad: .*is not a folder"):
        LLM(str(llama.folder), **options, lora_modules=f"bad={tmp_path / 'none'}")
    with pytest.raises(ConfigError, match="--lora-modules must be NAME=FOLDER, not 'x'"):
        LLM(str(llama.folder), **options, lora_modules="x")
    with pytest.raises(ConfigError, match="--max-lora-rank 16"):
        LLM(str(llama.folder), **options, lora_modules=f"one={folder}", max_lora_rank=8)
