"""A request's decisions as sentences, and as values."""

from __future__ import annotations

import json

import pytest

from paceline.audit.story import decision_values, story, story_values
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import RequestId
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

ME = RequestId(5)


def decided(kind: DecisionKind, reason: Rule, value: int = 0, *more: object, **named: object) -> Decision:
    return Decision(kind, ME, reason, value, *more, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "decision, sentence",
    [
        (
            decided(DecisionKind.ADMIT, Rule.FITS, 0, 3, 1.2, 90, 50, 4, 2, 1.2),
            "waited 1.2 s for its turn and was admitted at step 3, after request 2: 4 blocks needed, 50 free, "
            "90 tokens of the step left",
        ),
        (
            decided(DecisionKind.ADMIT, Rule.FITS, 16, 1, 0.01, 90, 50, 1, -1, 0.012),
            "waited 12 ms and was admitted at step 1: 1 block needed, 50 free, 90 tokens of the step left; "
            "16 tokens were in the cache already",
        ),
        (
            decided(DecisionKind.DEFER, Rule.BLOCKS, 3, 7, 1.0, 90, 12, 38, 17),
            "had to wait at step 7: 38 blocks were needed, 12 were free (3 kept for others), request 17 was ahead",
        ),
        (
            decided(DecisionKind.DEFER, Rule.RESERVE, 0, 7, 1.0, 90, 1, 1),
            "had to wait at step 7: 1 block was needed for its full length, 1 was free",
        ),
        (
            decided(DecisionKind.DEFER, Rule.ROWS, 0, 7, 1.0, 90, -1, -1, 17),
            "had to wait at step 7: all rows were taken, the last by request 17",
        ),
        (
            decided(DecisionKind.DEFER, Rule.BUDGET, 0, 7, 1.0, 0, -1, -1, 17),
            "had to wait at step 7: the step had no tokens left, the prompt of request 17 took the last of them",
        ),
        (
            decided(DecisionKind.DEFER, Rule.PREFIX, 0, 7, 1.0, 9, -1, -1, 17),
            "had to wait at step 7: request 17 was computing a beginning that it can share",
        ),
        (
            decided(DecisionKind.DEFER, Rule.LOADING, 0, 7, 1.0, 9),
            "had to wait at step 7: part of its prompt was coming from the disk",
        ),
        (
            decided(DecisionKind.DEFER, Rule.ASLEEP, 0, 7, 1.0, seconds=0.39),
            "had to wait 390 ms until step 7: its model was asleep",
        ),
        (
            decided(DecisionKind.LOAD, Rule.LOADS, 1024, 7, 1.0, detail="load 41.0 ms, compute 310.0 ms"),
            "1,024 tokens of its prompt came from host memory at step 7 "
            "(expected: load 41.0 ms, compute 310.0 ms)",
        ),
        (
            decided(DecisionKind.LOAD, Rule.COMPUTES, 64, 7, 1.0, detail="load 41.0 ms, compute 3.0 ms"),
            "computed 64 tokens of its prompt at step 7 that host memory has "
            "(expected: load 41.0 ms, compute 3.0 ms)",
        ),
        (
            decided(DecisionKind.LOAD, Rule.LOAD_FAILED, 64, 7, 1.0),
            "64 tokens of KV could not be copied to the device before step 7: to be computed",
        ),
        (
            decided(DecisionKind.PREEMPT, Rule.BLOCKS_RECOMPUTE, 512, 812, 1.0, 9, 2, 3, 40),
            "was preempted at step 812 for request 40: 2 blocks were free, 3 more needed "
            "(512 tokens of KV to be recomputed)",
        ),
        (
            decided(DecisionKind.PREEMPT, Rule.PAUSED_SWAP, 1, 812, 1.0),
            "was preempted at step 812: it was paused (1 token of KV copied to host memory)",
        ),
        (
            decided(DecisionKind.STALL, Rule.BLOCKS, 9, 8, 1.0, 9, 0, 1, 40),
            "stood still at step 8: a block was needed, 0 were free, request 40 got one before it",
        ),
        (
            decided(DecisionKind.FINISH, Rule.ABORT, 4, 8, 1.0, detail="the client went"),
            "was aborted (the client went) after 4 tokens of output, before step 8",
        ),
        (
            decided(DecisionKind.REFUSE, Rule.QUEUE_FULL, 99, 8),
            "was refused: the queue was full (99 tokens were asked for)",
        ),
        (
            decided(DecisionKind.FAIL, Rule.FINISH_HOOK, detail="KeyError"),
            "letting go of it raised KeyError; no other request was touched",
        ),
        (
            decided(DecisionKind.FORK, Rule.SHARES, 12, 8, 1.0, 9, 2, 3, 40),
            "branched off request 40 at step 8 and shares the KV of 12 tokens with it",
        ),
    ],
)
def test_a_decision_as_a_sentence(decision: Decision, sentence: str) -> None:
    told = story([decision])
    assert told[-1] == sentence
    begins = decision.kind in (DecisionKind.ADMIT, DecisionKind.DEFER, DecisionKind.REFUSE, DecisionKind.FORK)
    assert len(told) == (1 if begins or decision.kind in (DecisionKind.FAIL, DecisionKind.LOAD) else 2)


def test_what_was_waited_for_came_from_the_disk() -> None:
    detail = "load 41.0 ms, compute 310.0 ms"
    waits = decided(DecisionKind.LOAD, Rule.LOADING, 64, 7, 1.0, detail=detail)
    loads = decided(DecisionKind.LOAD, Rule.LOADS, 64, 8, 1.1, detail=detail)
    told = story([waits, decided(DecisionKind.DEFER, Rule.LOADING, 0, 7, 1.0, 9), loads])[-1]
    assert told == f"64 tokens of its prompt came from the disk at step 8 (expected: {detail})"


def test_a_story_that_has_lost_its_beginning_says_so() -> None:
    gone = decided(DecisionKind.PREEMPT, Rule.PAUSED_RECOMPUTE, 1, 8, 1.0)
    assert story([gone])[0] == "how it began is no longer known; what is left:"
    never_ran = decided(DecisionKind.FINISH, Rule.ABORT, 0, 8, 1.0)
    assert story([never_ran]) == ["was aborted after 0 tokens of output, before step 8"] and story([]) == []


def test_parts_of_one_step_are_told_together() -> None:
    held, rest = (decided(DecisionKind.CHUNK, rule, 8, 2) for rule in (Rule.SHARE, Rule.BUDGET))
    begun = decided(DecisionKind.ADMIT, Rule.FITS, 0, 2, 1.0, 90, 50, 4)
    [_, told] = story([begun, held, rest])
    assert told == "computed 16 tokens of its prompt at step 2 and no more: the step's tokens were used up"
    later = decided(DecisionKind.CHUNK, Rule.SHARE, 8, 3)
    assert story([begun, held, rest, later])[1] == (
        "computed 24 tokens of its prompt in parts from step 2 to step 3, each until the step's tokens were used up "
        "or it had the share of a step that one prompt gets while others wait"
    )


def test_a_deferred_request_says_how_long_it_waited_in_all() -> None:
    waits = decided(DecisionKind.DEFER, Rule.ROWS, 0, 7, 1.0, 90, -1, -1, 17)
    begun = decided(DecisionKind.ADMIT, Rule.FITS, 0, 9, 2.0, 90, 50, 4, 17, 1.5)
    assert story([waits, begun])[1].startswith(
        "waited 1.5 s in all and was admitted at step 9, after request 17"
    )


def test_a_branch_found_its_beginning_in_its_parent_not_in_the_cache() -> None:
    shares = decided(DecisionKind.FORK, Rule.SHARES, 12, 8, 1.0, 9, 2, 3, 40)
    begun = decided(DecisionKind.ADMIT, Rule.FITS, 12, 8, 1.0, 9, 2, 3, 40, 0.5)
    assert "cache" not in story([shares, begun])[1]


def test_parts_of_a_prompt_are_one_sentence_and_a_return_says_what_it_cost() -> None:
    chunks = [decided(DecisionKind.CHUNK, Rule.BUDGET, 16, step) for step in (2, 3, 4)]
    gone = decided(DecisionKind.PREEMPT, Rule.BLOCKS_RECOMPUTE, 60, 9, 2.0, 9, 1, 1, 7)
    back = decided(DecisionKind.RESUME, Rule.RECOMPUTE, 16, 12, 3.5, 99, 10, 4, 8)
    assert story([*chunks, gone, back])[1:] == [
        "computed 48 tokens of its prompt in parts from step 2 to step 4, each until the step's tokens were used up",
        "was preempted at step 9 for request 7: 1 block was free, 1 more needed (60 tokens of KV to be recomputed)",
        "came back at step 12 after 1.5 s: recomputed 44 tokens, 16 tokens were still in the cache "
        "(4 blocks needed, 10 free, 99 tokens of the step left)",
    ]


def test_every_rule_that_is_decided_has_a_sentence() -> None:
    """A busy engine with too little of everything; and every ending, by its rule alone."""
    bench = Bench(engine_config(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=8))
    ids = [bench.add(prompt(4 + 3 * start, start), 12) for start in range(6)]
    bench.run()
    for request_id in ids:
        told = story(bench.engine.decisions_of(request_id))
        assert "admitted" in " ".join(told) and "reached its length" in told[-1]
    endings = ("STOP", "LENGTH", "ABORT", "ERROR", "DEADLINE", "PRUNED", "NUMERICAL_ERROR")
    for name in (*endings, "INTERNAL_ERROR", "ENGINE_FAILED"):
        last = story([decided(DecisionKind.FINISH, Rule[name], 2, 4)])[-1]
        assert last.endswith("after 2 tokens of output, before step 4")


def test_values_leave_out_what_does_not_bear_on_a_decision() -> None:
    ended = decided(DecisionKind.FINISH, Rule.STOP, 7, 4, 1.5)
    assert decision_values(ended) == {
        "kind": "finish",
        "request": 5,
        "reason": "stop",
        "value": 7,
        "step": 4,
        "time_s": 1.5,
    }
    admitted = decided(DecisionKind.ADMIT, Rule.FITS, 0, 1, 1.5, 0, 3, 2, 1)
    values = json.loads(json.dumps(story_values([admitted, ended])))
    assert [each["kind"] for each in values["decisions"]] == ["admit", "finish"]
    assert values["decisions"][0]["budget_left"] == 0 and values["decisions"][0]["seconds"] == 0.0
    assert values["sentences"] == story([admitted, ended])
