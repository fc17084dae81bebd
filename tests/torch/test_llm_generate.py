"""`LLM`: what goes in, what comes out and in which order, and what is left in the engine afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, RequestOutput, RequestOutputKind, SamplingParams
from paceline.errors import ConfigError, EngineFailed, InvalidRequest
from paceline.factory import load_model
from paceline.llm.arguments import split_arguments
from tests.model_folder import CONTEXT, CONTROLS, EOS, VOCAB_SIZE
from tests.torch.llm_helpers import OPTIONS, is_at_rest

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return LLM(str(folder), **OPTIONS)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert is_at_rest(shared.loaded.engine), "a test left something in the engine"


def one(llm: LLM, prompt: Any, sampling: SamplingParams) -> RequestOutput:
    (output,) = llm.generate(prompt, sampling, use_tqdm=False)
    return output


# ---------------------------------------------------------------- outputs


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt number {index}" for index in range(40)]
    lengths = [1 + 7 * index % 30 for index in range(40)]
    params = [replace(GREEDY, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert len({output.request_id for output in outputs}) == 40


def test_metrics_say_what_requests_took(llm: LLM) -> None:
    (output,) = llm.generate(["what it takes"], replace(GREEDY, n=2, temperature=1.0, seed=1), use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.finished_s is not None and metrics.queue_s is not None
    # Two answers on a few blocks each: less than all of them from arrival to the end, more than one for a moment.
    longest_s = metrics.finished_s - metrics.arrival_s
    assert 0 < metrics.queue_s < longest_s and 0 < metrics.kv_block_seconds < longest_s * 2 * CONTEXT
    assert (metrics.preemptions, metrics.swaps, metrics.recomputed_tokens) == (0, 0, 0)
    assert metrics.copied() == metrics


def test_a_batch_writes_what_each_prompt_alone_writes(llm: LLM) -> None:
    prompts = ["alpha", "beta and more", "the third", "a"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [one(llm, prompt, GREEDY) for prompt in prompts]
    assert [o.outputs[0].text for o in together] == [o.outputs[0].text for o in alone]


def test_a_prompt_is_text_ids_or_a_mapping_of_either(llm: LLM) -> None:
    text = one(llm, "hello", GREEDY)
    ids = text.prompt_token_ids
    assert len(ids) == 5
    shapes: list[Any] = [ids, {"prompt": "hello"}, {"prompt_token_ids": ids}, tuple(ids)]
    for shape in shapes:
        output = one(llm, shape, GREEDY)
        assert (output.prompt_token_ids, output.outputs[0].text) == (ids, text.outputs[0].text)
    assert one(llm, ids, GREEDY).prompt is None
    both = one(llm, {"prompt": "shown", "prompt_token_ids": ids}, GREEDY)
    assert (both.prompt, both.prompt_token_ids) == ("shown", ids)
    several = llm.generate([ids, ids[:2]], GREEDY, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in several] == [5, 2]


def test_branches_share_the_prompt_and_differ(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.5, max_tokens=20, n=4, seed=7, ignore_eos=True)
    output = one(llm, "branches", sampling)
    assert [part.index for part in output.outputs] == [0, 1, 2, 3]
    texts = [part.text for part in output.outputs]
    assert len(set(texts)) == 4
    assert [part.text for part in one(llm, "branches", sampling).outputs] == texts, "a seed decides"
    assert output.num_cached_tokens == 0, "what branches take from each other is not a cache hit"


def test_requests_without_a_seed_draw_different_tokens(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    first, second = llm.generate(["same", "same"], sampling, use_tqdm=False)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


# ---------------------------------------------------------------- endings


# Without control tokens, which have no text: a character is a token.
LETTERS = replace(GREEDY, logit_bias=dict.fromkeys(range(len(CONTROLS)), -100.0))


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_ends_the_text_and_the_tokens(llm: LLM, included: bool) -> None:
    whole = one(llm, "hello there", LETTERS).outputs[0]
    stop = whole.text[9:12]
    at = whole.text.index(stop)
    sampling = replace(LETTERS, stop=("never", stop), include_stop_str_in_output=included, logprobs=1)
    part = one(llm, "hello there", sampling).outputs[0]
    assert part.text == whole.text[: at + (len(stop) if included else 0)]
    assert part.token_ids == whole.token_ids[: at + len(stop)]
    assert part.logprobs is not None and len(part.logprobs) == len(part.token_ids)
    assert part.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(part.logprobs, part.token_ids, strict=True))
    )
    assert (part.finish_reason, part.stop_reason) == ("stop", stop)


def test_a_step_may_bring_tokens_behind_a_stop_string(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS, speculative_config="ngram") as llm:
        whole = one(llm, "hello there", LETTERS).outputs[0]
        stop = whole.text[3:5]
        end = whole.text.index(stop) + len(stop)
        told = replace(LETTERS, stop=(stop,), logprobs=1, prediction=tuple(whole.token_ids))
        counters = llm.loaded.engine.scheduler.state.counters
        for _ in range(
            20
        ):  # until a step has brought more than the stop: how many drafts it has hangs on its time
            before = counters.accepted_tokens
            part = one(llm, "hello there", told).outputs[0]
            assert part.token_ids == whole.token_ids[:end]
            assert part.logprobs is not None and len(part.logprobs) == end
            assert part.cumulative_logprob == pytest.approx(
                sum(entry[token].logprob for entry, token in zip(part.logprobs, part.token_ids, strict=True))
            )
            if counters.accepted_tokens - before >= end:
                return
        pytest.fail("no step had drafts behind the stop")


def test_a_stop_id_is_counted_and_not_shown(llm: LLM) -> None:
    whole = one(llm, "hello there", LETTERS).outputs[0]
    stop = whole.token_ids[6]
    at = whole.token_ids.index(stop)
    part = one(llm, "hello there", replace(LETTERS, stop_token_ids=(stop,))).outputs[0]
    assert part.token_ids == whole.token_ids[: at + 1]
    assert part.text == whole.text[:at]
    assert (part.finish_reason, part.stop_reason) == ("stop", stop)


def test_the_end_of_text_stops_without_a_reason(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=9, logit_bias={EOS: 100.0})
    part = one(llm, "hello", sampling).outputs[0]
    assert (part.token_ids, part.text) == ([EOS], "")
    assert (part.finish_reason, part.stop_reason) == ("stop", None)
    ignored = one(llm, "hello", replace(sampling, ignore_eos=True)).outputs[0]
    assert (len(ignored.token_ids), ignored.finish_reason) == (9, "length")


def test_an_answer_is_at_most_the_rest_of_the_context(llm: LLM) -> None:
    assert llm.max_model_len == CONTEXT
    output = one(llm, "x" * 200, replace(GREEDY, max_tokens=10_000, min_tokens=9_000))
    assert len(output.outputs[0].token_ids) == CONTEXT - 200
    assert output.outputs[0].finish_reason == "length"


# ---------------------------------------------------------------- logprobs


def test_logprobs_of_the_output(llm: LLM) -> None:
    part = one(llm, "hello", replace(GREEDY, max_tokens=6, logprobs=3)).outputs[0]
    assert part.logprobs is not None and len(part.logprobs) == 6
    for token, entry in zip(part.token_ids, part.logprobs, strict=True):
        assert token in entry and len(entry) == 3, "greedy takes the likeliest, which is one of the three"
        assert entry[token].rank == 1
        assert sorted(value.rank or 0 for value in entry.values()) == [1, 2, 3]
        assert entry[token].logprob == max(value.logprob for value in entry.values()) < 0
    characters = [
        entry[token].decoded_token for token, entry in zip(part.token_ids, part.logprobs, strict=True)
    ]
    assert "".join(map(str, characters)) == part.text
    assert one(llm, "hello", GREEDY).outputs[0].logprobs is None


def test_logprobs_of_the_prompt(llm: LLM) -> None:
    output = one(llm, "hello there", replace(GREEDY, max_tokens=2, prompt_logprobs=2))
    found = output.prompt_logprobs
    assert found is not None and len(found) == 11 and found[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], found[1:], strict=True):
        assert entry is not None and token in entry and len(entry) in (2, 3)
    again = one(llm, "hello there", replace(GREEDY, max_tokens=2, prompt_logprobs=2))
    assert again.prompt_logprobs == found, "a cached prompt is computed again when its logprobs are asked for"


# ---------------------------------------------------------------- conversations


def test_a_conversation_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (single,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert single.prompt == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    several = llm.chat([messages, [{"role": "user", "content": "other"}]], GREEDY, use_tqdm=False)
    assert several[0].outputs[0].text == single.outputs[0].text
    assert several[1].prompt != single.prompt
    with pytest.raises(InvalidRequest, match="role"):
        llm.chat([{"role": "wizard", "content": "hi"}], GREEDY, use_tqdm=False)


def test_without_sampling_a_chat_has_the_models_default_and_the_rest_of_the_context(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_p": 0.8}')
    llm = LLM(str(folder), **OPTIONS)
    (folder / "generation_config.json").unlink()
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_p, default.max_tokens) == (0.0, 0.8, 16)
    messages = [{"role": "user", "content": "hi"}]
    (plain,) = llm.chat(messages, use_tqdm=False)
    (given,) = llm.chat(messages, replace(default, max_tokens=CONTEXT), use_tqdm=False)
    assert plain.outputs[0].token_ids == given.outputs[0].token_ids
    assert plain.outputs[0].finish_reason == "stop" or len(plain.outputs[0].token_ids) > 16
    (text,) = llm.generate("hi", use_tqdm=False)
    assert len(text.outputs[0].token_ids) <= 16


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        "x" * CONTEXT,
        [VOCAB_SIZE],
        [-1],
        [True],
        {"text": "hi"},
        {"prompt": 5},
        {"prompt_token_ids": 3},
        7.5,
    ],
)
def test_a_bad_prompt_fails_before_anything_runs(llm: LLM, prompt: Any) -> None:
    before = llm.loaded.engine.num_submitted
    with pytest.raises(InvalidRequest):
        llm.generate(["fine", prompt], GREEDY, use_tqdm=False)
    assert llm.loaded.engine.num_submitted == before


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 sampling"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="2 prompts and 3 priorities"):
        llm.generate(["a", "b"], GREEDY, priority=[1, 2, 3], use_tqdm=False)


def test_options_are_checked_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no option max_num_seq; did you mean max_num_seqs"):
        LLM(str(folder), max_num_seq=4)
    with pytest.raises(ConfigError, match="data_parallel_size=2 is not supported"):
        LLM(str(folder), data_parallel_size=2)
    with pytest.raises(ConfigError, match="enable_prompt_adapter"):
        LLM(str(folder), enable_prompt_adapter=True)
    with pytest.raises(ConfigError, match="quantization"):
        LLM(str(folder), quantization="awq")
    with pytest.raises(ConfigError, match="--block-size"):
        LLM(str(folder), load_format="dummy", block_size=0)


@pytest.mark.parametrize("name", ["prompt_adapter_request", "prompt_token_ids", "mm_processor_kwargs"])
def test_arguments_of_a_call_that_are_not_supported_are_named(llm: LLM, name: str) -> None:
    given: dict[str, Any] = {name: object()}
    nothing: dict[str, Any] = {name: None}
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported: .") as caught:
        llm.generate("x", GREEDY, use_tqdm=False, **given)
    assert caught.value.param == name
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported: ."):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, **given)
    assert llm.generate("x", GREEDY, use_tqdm=False, **nothing)[0].finished, "None asks for nothing"


def test_an_argument_of_a_call_suggests_the_closest(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"generate\(\) has no argument use_tqm; did you mean use_tqdm\?"):
        llm.generate("x", GREEDY, use_tqm=False)


def test_prompts_with_more_than_text_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="multi_modal_data is not supported: give pictures in messages"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": object()}}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("name", ["encode", "reward", "beam_search"])
def test_methods_that_are_not_there_say_what_to_do(llm: LLM, name: str) -> None:
    with pytest.raises(AttributeError, match=f"^LLM.{name} is not supported: ."):
        getattr(llm, name)("x")
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        llm.generat  # noqa: B018


def test_whole_outputs_come_whatever_kind_is_asked_for(llm: LLM) -> None:
    texts = {
        kind: one(llm, "as a whole", replace(GREEDY, output_kind=kind)).outputs[0].text
        for kind in RequestOutputKind
    }
    assert len(set(texts.values())) == 1 and texts[RequestOutputKind.DELTA]


def test_it_is_shut_down_at_the_end_of_with_and_says_what_it_holds(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.generate("x", GREEDY, use_tqdm=False)[0].finished
        told = f"LLM(model={folder.name!r}, device='cpu', dtype='float32', rows=16, blocks=96"
        assert repr(llm) == f"{told})"
    assert repr(llm) == f"{told}, closed)"
    with pytest.raises(EngineFailed, match="was shut down"):
        llm.generate("x", GREEDY, use_tqdm=False)
    llm.shutdown()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_loading_tells_how_far_it_is(folder: Path, backend: str) -> None:
    told: list[tuple[str, int, int]] = []
    model, given = split_arguments(str(folder), {**OPTIONS, "cpu_backend": backend})
    loaded = load_model(model, given, on_progress=lambda *stage: told.append(stage))
    layers = loaded.checkpoint.spec.num_layers
    # A layer, or a matrix: seven in each layer, embedding and output.
    parts = layers if backend == "torch" else 7 * layers + 2
    weights = [("loading weights", done, parts) for done in range(1, parts + 1)]
    around = ([("starting torch", 0, 0)], [("measuring steps", 0, 0)]) if backend == "torch" else ([], [])
    assert told == [*around[0], *weights, *around[1]]
    loaded.engine.close()


def test_ids_alone_need_no_tokenizer(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS, skip_tokenizer_init=True)
    output = one(llm, [5, 6, 7], GREEDY)
    assert len(output.outputs[0].token_ids) == 24 and output.outputs[0].text == ""
    with pytest.raises(InvalidRequest, match="token ids"):
        llm.generate("text", GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        llm.generate([5], replace(GREEDY, stop=("x",)), use_tqdm=False)


# ---------------------------------------------------------------- what is left behind


def test_an_interrupt_leaves_the_engine_idle(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.loaded.engine
    step, begun, completed = engine.step, 0, 0

    def interrupted() -> Any:
        nonlocal begun, completed
        begun += 1
        if begun == 5:
            signal.raise_signal(signal.SIGINT)
        events = step()
        completed += 1
        return events

    expected = one(llm, "hello", GREEDY).outputs[0].text
    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello"] * 30, GREEDY, use_tqdm=False)
    assert (begun, completed) == (5, 5), "it arrives inside a step and acts behind it"
    assert is_at_rest(engine)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert one(llm, "hello", GREEDY).outputs[0].text == expected


def test_more_requests_than_the_queue_takes_are_fed_as_it_drains(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS, max_queue=6)
    sampling = replace(GREEDY, n=3, temperature=1.0, max_tokens=5)
    outputs = llm.generate(["abc"] * 20, sampling, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [3] * 20
    assert all(part.finish_reason == "length" for output in outputs for part in output.outputs)
    refused = one(llm, "abc", replace(sampling, n=7))
    assert {part.finish_reason for part in refused.outputs} == {"error"}, (
        "seven never fit into a queue of six"
    )
    assert is_at_rest(llm.loaded.engine)
