"""Rules on logits through Triton's interpreter, and against the rules of the CPU; tests/gpu has larger shapes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.core.sampling import SamplingParams
from paceline.runner.gpu.kernels.logit_rules import (
    KnownTokens,
    RuleColumns,
    allocate_rule_pool,
    apply_rules,
    fill_seen,
    note_drawn,
)
from paceline.runner.sampling.processors import LogitRules
from tests.gpu import kernel_rule_cases as cases

VOCABULARY = 4200
EOS = (17, 3000)


@pytest.mark.parametrize("rows, width, vocabulary", [(1, 9, 100), (4, 1100, 4200)])
def test_places_hold_what_rows_know(rows: int, width: int, vocabulary: int) -> None:
    cases.check_seen("cpu", rows=rows, width=width, vocabulary=vocabulary)


@pytest.mark.parametrize("slots, vocabulary", [(4, 9000), (12, 300)])
def test_rules_are_those_of_the_definition(slots: int, vocabulary: int) -> None:
    cases.check_rules("cpu", slots=slots, vocabulary=vocabulary)


def test_bans_that_would_leave_nothing_are_skipped() -> None:
    cases.check_bans_that_would_leave_nothing("cpu")


def test_a_rule_hides_no_logit_that_is_not_finite() -> None:
    cases.check_unusable_logits_stay("cpu")


def random_params() -> SamplingParams:
    def ids(most: int) -> tuple[int, ...]:
        return tuple(random.choices(range(VOCABULARY), k=random.randrange(most)))

    return SamplingParams(
        max_tokens=50,
        min_tokens=random.choice([0, 8]),
        repetition_penalty=random.choice([1.0, 1.3, 0.7]),
        frequency_penalty=random.choice([0.0, 0.3, -1.1]),
        presence_penalty=random.choice([0.0, 0.7]),
        logit_bias={token: random.uniform(-50, 50) for token in ids(300)},
        allowed_token_ids=random.choice([None, (5, *ids(20))]),
        bad_words=tuple((token,) for token in ids(20)),
        stop_token_ids=ids(5),
    )


def test_three_steps_of_rows_give_the_logits_the_cpu_gives() -> None:
    rows, width = 5, 40
    params = [random_params() for _ in range(rows)]
    tokens = torch.randint(0, 30, (rows, width), dtype=torch.int32)
    length = torch.randint(10, width, (rows,), dtype=torch.int32)
    num_prompt = length - torch.randint(0, 10, (rows,), dtype=torch.int32)
    pool = allocate_rule_pool(rows, VOCABULARY, "cpu")
    every = torch.arange(rows, dtype=torch.int32)
    known = KnownTokens(tokens=tokens, length=length, num_prompt=num_prompt)
    fill_seen(pool, every, every, known)
    rules = []
    for row, own in enumerate(params):
        prompt, history = int(num_prompt[row]), tokens[row, : int(length[row])].numpy()
        rules.append(LogitRules(own, history, prompt, EOS))
        banned = [word[-1] for word in own.bad_words if not isinstance(word, str)]
        ends = [*own.stop_token_ids, *EOS]
        allowed = None if own.allowed_token_ids is None else list(own.allowed_token_ids)
        cases.write_lists(pool, row, (allowed, banned, ends, dict(own.logit_bias)))
        penalties = [own.repetition_penalty, own.frequency_penalty, own.presence_penalty]
        pool.penalties[row] = torch.tensor(penalties, dtype=torch.float32)
        pool.stop_from[row] = prompt + own.min_tokens
    position = length.long()
    columns = RuleColumns(slot_rows=every, place=every, position=position)
    for _ in range(3):
        logits = torch.randn(rows, VOCABULARY) * 5
        expected = logits.numpy().copy()
        apply_rules(logits, pool, columns)
        drawn = torch.randint(0, 35, (rows,), dtype=torch.int32)
        note_drawn(pool, columns, drawn)
        for row, rule in enumerate(rules):
            rule.apply(expected[row], int(position[row]))
            rule.note(int(drawn[row]))
            assert np.array_equal(logits[row].numpy(), expected[row]), params[row]
        position += 1


@pytest.mark.parametrize("rows, vocabulary", [(1, 300), (5, 4129)])
def test_masks_hide_what_is_not_allowed(rows: int, vocabulary: int) -> None:
    cases.check_masks("cpu", rows=rows, vocabulary=vocabulary)
