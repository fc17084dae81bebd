"""Values of the run log: each comes back as it went in, without its tokens."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.audit.codec import (
    Generations,
    decode_add,
    decode_input,
    decode_result,
    encode_input,
    encode_result,
    pack,
    plain,
    unpack,
)
from paceline.core.dial import DialKind
from paceline.core.inputs import (
    INPUT_TYPES,
    AbortRequest,
    AdapterRead,
    AddRequest,
    Block,
    Done,
    Expired,
    Extend,
    FailAll,
    FailRequest,
    FinishRequest,
    Idle,
    Keys,
    MoveSlab,
    Pause,
    Preempt,
    ResetCache,
    Restored,
    Resume,
    SetAdapter,
    SetDeadline,
    SetDial,
    SetPolicy,
    SetPriority,
    SetScore,
    Shrink,
    Sleep,
    StepFailed,
    Unblock,
    Unpin,
    Withheld,
)
from paceline.core.plan import STOPPED, GuideWork, StepResult, StepTimes, i32
from paceline.core.request import BlockReason, RequestId, TreeLimits

KEYS = (bytes(range(4)), b"\xff\x00")
ADD = AddRequest(id=RequestId(1), num_prompt=9, max_tokens=11, arrival_s=0.25, keys=KEYS, num_tokens=9)
BRANCH = AddRequest(
    id=RequestId(2),
    num_prompt=5,
    max_tokens=10,
    arrival_s=0.5,
    tenant="a",
    priority=-1,
    deadline_s=9.5,
    parent=RequestId(1),
    adapter=2,
    num_tokens=6,
    together=2,
    wishes=(9000, None, 50, "try"),
    service_class="batch",
    shares=4,
    score=0.5,
    hold_s=2.0,
    tree=(3, None, 8),
)


def test_numbers_that_json_lacks_and_values_it_cannot_hold() -> None:
    assert encode_input(np.float64(0.5), SetDeadline(request=RequestId(3), deadline_s=math.inf)) == [
        "deadline",
        0.5,
        3,
        "inf",
    ]
    assert plain({"a": {3, 1, 2}, "b": (np.bool_(True), -math.inf, np.arange(2))}) == {
        "a": [1, 2, 3],
        "b": [True, "-inf", [0, 1]],
    }
    with pytest.raises(TypeError, match="cannot hold a object"):
        plain(object())


def test_an_add_comes_back_as_a_request_without_tokens() -> None:
    request = decode_add(encode_input(0.5, BRANCH)[2]).make_request()
    assert (request.id, request.num_prompt, request.num_tokens, request.max_total) == (2, 5, 6, 15)
    assert (request.tenant, request.deadline_s, request.arrival_s) == ("a", 9.5, 0.5)
    assert (request.service_level, request.priority) == (("batch", -1), 1)
    assert (request.parent, request.model, request.adapter) == (1, 0, 2)
    assert not request.tokens.any()
    assert (request.shares, request.score) == (4, 0.5)
    assert request.tree_limits == TreeLimits(max_rows=3, max_branches=8)
    wanted = request.sampling
    assert (wanted.on_stop, wanted.hold_s) == ("hold", 2.0)
    assert (wanted.deadline_ms, wanted.ttft_slo_ms, wanted.itl_slo_ms, wanted.on_infeasible) == (
        9000,
        None,
        50,
        "try",
    )
    request = decode_add(encode_input(0.5, ADD)[2]).make_request()
    assert [key.key.hex() for key in request.keys] == ["00010203", "ff00"]
    assert not request.sampling.has_objectives


def test_every_input_comes_back_as_it_went_in() -> None:
    one = RequestId(1)
    given = [
        *(ADD, BRANCH, AbortRequest(request=one, detail="pruned"), FinishRequest(request=one, num_output=3)),
        FailRequest(request=one, detail="grammar_error"),
        Extend(
            request=one,
            num_tokens=3,
            max_tokens=9,
            stretches=((20, 68, 1, 0),),
            modules=((KEYS, 50, 16, (60, "ctx")), (KEYS, 50, 16, None)),
        ),
        *(Extend(request=one, num_tokens=3, max_tokens=9), SetScore(request=one, score=-0.5)),
        *(SetPriority(request=one, priority=-2), SetDeadline(request=one, deadline_s=math.inf)),
        SetDeadline(request=one, deadline_s=None),
        SetPolicy(name="fair", options=(("output_token_cost", 2.0), ("tenant_weights", "a=2"))),
        *(
            SetDial(target=DialKind.ITL, value=40.0),
            Preempt(request=one, swap=None),
            Pause(request=one, swap=True),
        ),
        *(
            Resume(request=one),
            Block(request=one, reason=BlockReason.GRAMMAR, deadline_s=7.5),
            Unblock(request=one),
        ),
        *(Unpin(tenant="alice", name="ctx_1"), SetAdapter(number=2, identity="ab12")),
        Restored(places=(3, 1), keys=KEYS[:2], uses=(1024, 0), learned=((0.5, 2.0), ())),
        AdapterRead(number=2, failed=True),
        *(ResetCache(), Done(seq=4), StepFailed(), Sleep(levels_lost=2), MoveSlab(number=3, gained=True)),
        *(Shrink(), FailAll(), Withheld(blocks=(3, 0))),
        *(Expired(request=one), Keys(request=one, keys=KEYS), Idle()),
    ]
    assert {type(each) for each in given} == set(INPUT_TYPES.values())
    for each in given:
        assert decode_input(json.loads(json.dumps(encode_input(0.5, each)))) == (0.5, each)


def test_an_input_of_an_unknown_kind_or_with_other_values_is_refused() -> None:
    with pytest.raises(ValueError, match="knows no such input"):
        decode_input(["teleport", 0.5, 1])
    with pytest.raises(ValueError):
        decode_input(["abort", 0.5, 1])


# -- packed columns and results ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, text",
    [
        ([], ""),
        ([5], "5"),
        ([5, 6], "5,6"),
        ([5, 6, 7], "5..7"),
        ([5, 5], "5,5"),
        ([5, 5, 5], "5x3"),
        ([0, 1, 2, 3, 3, 3, 3, 9], "0..3,3x3,9"),
        ([0, 2, 4, 6], "0,2,4,6"),
        ([7, 7, 8, 9, 1], "7,7..9,1"),
        ([-1, 0, 1, -1, -1, -1], "-1..1,-1x3"),
        ([2**31 - 1, -(2**31)], "2147483647,-2147483648"),
    ],
)
def test_columns_are_packed_into_runs(values: list[int], text: str) -> None:
    assert pack(i32(values)) == text
    assert unpack(text).tolist() == values


@given(st.lists(st.integers(-3, 6) | st.integers(-(2**31), 2**31 - 1), max_size=60))
def test_packing_loses_nothing(values: list[int]) -> None:
    assert unpack(pack(np.array(values, np.int32))).tolist() == values


@pytest.mark.parametrize(
    "text", ["a", "1,", "3..1", "1x0", "1x-2", "1..", "1x99999999", "0..4194304", "12345678901"]
)
def test_a_broken_column_is_refused(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        unpack(text)


def test_results_come_back_as_they_were() -> None:
    given = StepResult(
        seq=3,
        rows=i32([0, 1, 2, 9]),
        generation=i32([1, 5, 1, 2]),
        tokens=i32([77] * 4)[:, None],
        count=i32([1, 0, 1, 1]),
        finished=np.array([0, 0, STOPPED, 0], np.uint8),
        finite=np.array([True, False, True, True]),
        copies_done=i32([4, 2]),
        copies_failed=i32([3]),
        times=StepTimes(start_s=0.1, end_s=0.3),
        guided=GuideWork(3, 0.01, 2, 0.01, certain=7),
    )
    for known in ([1, 5, 1, 2], [1, 5, 1, 1]):  # as the joins said, and not
        generations = Generations()
        generations.join(given.rows, i32(known))
        encoded = encode_result(given, generations)
        assert ("generation" in encoded) == (known[3] == 1)
        back = decode_result(encoded, 3, generations)
        for name in ("rows", "generation", "count", "finished", "finite", "copies_done", "copies_failed"):
            column = getattr(back, name)
            assert column.tolist() == getattr(given, name).tolist()
            assert column.dtype == getattr(given, name).dtype
        assert (back.seq, back.times.start_s, back.times.end_s) == (3, 0.1, 0.3)
        assert back.tokens.shape == (4, 1) and not back.tokens.any()
        assert back.guided is not None and back.guided.certain == 7


def test_an_empty_result_comes_back() -> None:
    none = i32()
    given = StepResult(
        seq=1,
        rows=none,
        generation=none,
        tokens=none[:, None],
        count=none,
        finished=none.astype(np.uint8),
        finite=none.astype(np.bool_),
    )
    back = decode_result(encode_result(given, Generations()), 1, Generations())
    assert back.guided is None
    assert len(back.rows) == len(back.generation) == len(back.finished) == len(back.finite) == 0


def test_columns_of_different_lengths_are_refused() -> None:
    for broken in ({"rows": "0..3", "count": "1x3"}, {"rows": "0", "count": "1", "finite": "1,1"}):
        with pytest.raises(ValueError, match="a column has"):
            decode_result(broken, 1, Generations())
