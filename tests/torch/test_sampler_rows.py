"""Rows are on their own: same tokens alone and in company, in any row, after a resume, and after a former owner."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.plan import RowLogprobs
from paceline.core.sampling import SamplingParams
from paceline.runner.sampling.sampler import Sampler
from tests.torch.sampler_helpers import Story, random_logits, sample_one, token_reference

EOS = (0,)
VOCAB = 4100  # not a whole number of groups of four, and more than one batch holds
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 3000, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.9, "logit_bias": {5: 6.0}, "bad_words": ((5, 5),), "min_tokens": 3},
    {"temperature": 2.0, "allowed_token_ids": tuple(range(100, 180)), "logprobs": 0},
]


def stories(vocab_size: int = VOCAB) -> list[Story]:
    made = []
    for i, fields in enumerate(MIXED):
        generator = np.random.default_rng(i)
        tokens = generator.integers(0, min(vocab_size, 50), 20).tolist()
        made.append(Story(SamplingParams(seed=i * 7919, **fields), tokens, 20))
    return made


def generate(
    told: list[Story], rows: list[int], num_steps: int, vocab_size: int = VOCAB
) -> list[tuple[int, RowLogprobs | None]]:
    """Run stories together; each story's logits depend on its number and length alone."""
    sampler = Sampler(max(rows) + 1, vocab_size, EOS)
    for story, row in zip(told, rows, strict=True):
        story.join(sampler, row)
    given_logprobs: list[tuple[int, RowLogprobs | None]] = []
    for _ in range(num_steps):
        logits = torch.cat([next_logits(story, vocab_size) for story in told])
        lengths = np.array([len(story.tokens) for story in told])
        drawn = sampler.sample(logits.numpy(), np.array(rows), lengths)
        assert drawn.finite.all()
        by_row = {entry.row: replace(entry, row=0) for entry in drawn.logprobs}
        for story, row, token in zip(told, rows, drawn.tokens.tolist(), strict=True):
            story.extend(token)
            given_logprobs.append((story.params.seed or 0, by_row.get(row)))
    return given_logprobs


def next_logits(story: Story, vocab_size: int) -> torch.Tensor:
    """Much the same at every position, so that tokens come back and penalties have something to say."""
    seed = story.params.seed or 0
    return random_logits(seed, 1, vocab_size) + random_logits(
        seed + 1 + len(story.tokens), 1, vocab_size, 0.3
    )


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], list[RowLogprobs | None]]]:
    """What each story gives alone, in row 0."""
    result = []
    for story in stories():
        logprobs = [entry for _, entry in generate([story], [0], 6)]
        result.append((story.drawn, logprobs))
    return result


def test_in_a_batch_as_alone(alone: list[tuple[list[int], list[RowLogprobs | None]]]) -> None:
    together = stories()
    logprobs = generate(together, list(range(len(together))), 6)
    for i, story in enumerate(together):
        assert story.drawn == alone[i][0], story.params
        assert [entry for _, entry in logprobs[i :: len(together)]] == alone[i][1]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_in_any_order_and_any_row(
    order: int, alone: list[tuple[list[int], list[RowLogprobs | None]]]
) -> None:
    generator = np.random.default_rng(order)
    shuffled = generator.permutation(len(MIXED)).tolist()
    told = stories()
    num_rows = len(MIXED) if order < 3 else 100  # the same rows exchanged, or others
    rows = generator.choice(num_rows, len(MIXED), replace=False).tolist()
    generate([told[i] for i in shuffled], rows, 6)
    assert [story.drawn for story in told] == [tokens for tokens, _ in alone]


@pytest.mark.parametrize("preempted_after", range(1, 6))
def test_a_resumed_row_goes_on_as_if_nothing_had_happened(
    preempted_after: int, alone: list[tuple[list[int], list[RowLogprobs | None]]]
) -> None:
    told = stories()
    generate(told, list(range(len(told))), preempted_after)
    generate(told, list(range(len(told)))[::-1], 6 - preempted_after)  # joined anew, in other rows
    assert [story.drawn for story in told] == [tokens for tokens, _ in alone]


def test_the_prompt_is_not_output_after_a_resume() -> None:
    """Where resuming counted the prompt, or forgot the output, frequency penalties would choose differently."""
    logits = torch.zeros(8)
    logits[3], logits[4], logits[5] = 1.0, 0.9, 0.8
    params = SamplingParams(temperature=0.0, frequency_penalty=0.2, presence_penalty=0.05)
    assert sample_one(params, logits, [3, 3, 3], 3).tokens[0] == 3
    assert sample_one(params, logits, [3, 3, 3], 2).tokens[0] == 4
    assert sample_one(params, logits, [3, 3, 4], 1).tokens[0] == 5


def test_the_position_is_that_of_the_sequence_not_of_the_stay() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams(seed=5)
    sampler = Sampler(1, 1000, ())
    sampler.join(0, params, np.array([1, 2], dtype=np.int32), 2)
    first = sampler.sample(logits[None].clone().numpy(), np.array([0]), np.array([2])).tokens[0]
    second = sampler.sample(logits[None].clone().numpy(), np.array([0]), np.array([3])).tokens[0]
    assert sample_one(params, logits, [1, 2, int(first)], 2).tokens[0] == second
    assert first != second


@pytest.mark.parametrize("former", range(len(MIXED)))
def test_nothing_of_a_former_owner_stays(
    former: int, alone: list[tuple[list[int], list[RowLogprobs | None]]]
) -> None:
    before, sampler = stories()[former], Sampler(1, VOCAB, EOS)
    before.params = replace(before.params, stop_token_ids=(1, 2, 3), ignore_eos=True)
    for number, story in enumerate(stories()):
        before.join(sampler, 0)
        sampler.sample(next_logits(before, VOCAB).numpy(), np.array([0]), np.array([len(before.tokens)]))
        story.join(sampler, 0)
        for _ in range(2):
            drawn = sampler.sample(
                next_logits(story, VOCAB).numpy(), np.array([0]), np.array([len(story.tokens)])
            )
            assert (len(drawn.logprobs) == 1) is (story.params.logprobs is not None)
            assert not drawn.stopped.any() or drawn.tokens[0] in EOS
            story.extend(int(drawn.tokens[0]))
        assert story.drawn == alone[number][0][:2]


# ---------------------------------------------------------------- rows that are not usable


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_is_reported_and_disturbs_no_other(
    bad: float, alone: list[tuple[list[int], list[RowLogprobs | None]]]
) -> None:
    told = stories()
    told = [story for story in told for _ in range(2)]  # every second row gets bad numbers
    sampler = Sampler(len(told), VOCAB, EOS)
    for row, story in enumerate(told):
        story.join(sampler, row)
    logits = torch.cat([next_logits(story, VOCAB) for story in told])
    logits[1::2, 77] = bad
    drawn = sampler.sample(logits.numpy(), np.arange(len(told)), np.full(len(told), 20))
    assert drawn.finite.tolist() == [True, False] * len(MIXED)
    assert not drawn.stopped[1::2].any()
    assert ((drawn.tokens >= 0) & (drawn.tokens < VOCAB)).all()
    assert {entry.row % 2 for entry in drawn.logprobs} == {0}
    assert drawn.tokens[::2].tolist() == [tokens[0] for tokens, _ in alone]


def test_a_row_of_nans_only() -> None:
    for temperature in (0.0, 1.0):
        drawn = sample_one(SamplingParams(temperature=temperature, seed=1), torch.full((40,), float("nan")))
        assert not drawn.finite[0] and 0 <= drawn.tokens[0] < 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_from(temperature: float) -> None:
    drawn = sample_one(SamplingParams(temperature=temperature, seed=1), torch.full((8,), -torch.inf))
    assert not drawn.finite[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (3,), "bad_words": ((3,),)},
        {"allowed_token_ids": (3, 4), "bad_words": ((3,),), "stop_token_ids": (4,), "min_tokens": 2},
        {"allowed_token_ids": (5,), "min_tokens": 2},
        {"bad_words": tuple((token,) for token in range(8))},
    ],
)
def test_what_forbids_every_token_forbids_none(temperature: float, fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, seed=1, logprobs=1, **fields)
    drawn = sample_one(params, torch.zeros(8), eos=(5,))
    assert drawn.finite[0] and drawn.tokens[0] in fields.get("allowed_token_ids", range(8))
    assert len(drawn.logprobs) == 1


def test_minus_infinity_is_a_token_that_is_never_drawn() -> None:
    logits = torch.full((8,), -torch.inf)
    logits[5] = -3.0
    for fields in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9}):
        drawn = sample_one(SamplingParams(seed=1, **fields), logits)
        assert drawn.finite[0] and drawn.tokens[0] == 5


def test_a_step_without_rows() -> None:
    no_rows = np.zeros(0, dtype=np.int64)
    drawn = Sampler(4, 8, ()).sample(np.zeros((0, 8), np.float32), no_rows, no_rows)
    assert len(drawn.tokens) == len(drawn.finite) == len(drawn.stopped) == len(drawn.logprobs) == 0


# ---------------------------------------------------------------- any mix of parameters

SIZES = st.sampled_from([5, 8, 33])
IDS = st.integers(0, 4)


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    fields: dict[str, Any] = {"seed": draw(st.integers(-(2**63), 2**63 - 1))}
    choices: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 7, 100]),
        "top_p": st.sampled_from([0.001, 0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.4, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.7]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.75]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 1.25]),
        "logit_bias": st.dictionaries(IDS, st.sampled_from([-100.0, -1.5, 2.5, 100.0]), max_size=3),
        "allowed_token_ids": st.lists(IDS, min_size=1, max_size=4, unique=True).map(tuple),
        "bad_words": st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(IDS, max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, -1, 0, 2]),
    }
    for name in sorted(draw(st.sets(st.sampled_from(sorted(choices)), max_size=6))):
        fields[name] = draw(choices[name])
    return SamplingParams(**fields)


@st.composite
def any_story(draw: st.DrawFn) -> Story:
    tokens = draw(st.lists(IDS, min_size=1, max_size=6))
    return Story(draw(any_params()), tokens, draw(st.integers(1, len(tokens))))


@settings(max_examples=settings().max_examples * 3 // 2)
@given(st.lists(any_story(), min_size=1, max_size=5), SIZES, st.integers(0, 2**20), st.booleans())
def test_any_mix_gives_what_each_row_gives_alone_and_what_the_definition_says(
    told: list[Story], vocab_size: int, seed: int, rounded: bool
) -> None:
    batch = Sampler(len(told), vocab_size, EOS)
    singles = [Sampler(7, vocab_size, EOS) for _ in told]
    for row, story in enumerate(told):
        story.join(batch, row)
        story.join(singles[row], 6)
    for step in range(3):
        logits = random_logits(seed + step, len(told), vocab_size)
        logits = logits.round() if rounded else logits
        lengths = np.array([len(story.tokens) for story in told])
        together = batch.sample(logits.clone().numpy(), np.arange(len(told)), lengths)
        for row, story in enumerate(told):
            single = singles[row].sample(
                logits[row : row + 1].clone().numpy(), np.array([6]), lengths[row : row + 1]
            )
            expected = token_reference(logits[row].numpy(), story, EOS)
            assert together.finite[row] == single.finite[0] == (expected is not None)
            assert together.tokens[row] == single.tokens[0]
            assert together.stopped[row] == single.stopped[0]
            reported = [replace(entry, row=6) for entry in together.logprobs if entry.row == row]
            assert reported == list(single.logprobs)
            if expected is None:
                return  # such a row ends; what it would say next is not defined
            assert single.tokens[0] == expected
            story.extend(int(single.tokens[0]))
