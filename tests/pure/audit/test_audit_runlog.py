"""The run log as a file: what its lines say, what they leave out, and how a broken one is reported."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import __version__
from paceline.audit.codec import config_of, decode_decision, encode_decision, plain
from paceline.audit.runlog import RunLog, RunLogWriter, read_run_log, run_header
from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.inputs import AbortRequest, AddRequest, Done, Idle, Keys
from paceline.core.plan import (
    BlockAppends,
    RowJoins,
    RowSet,
    RowSpans,
    StepPlan,
    StepResult,
    StepTimes,
    StepWork,
    i32,
)
from paceline.core.recorder import StepRecord, StepRecorder
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.errors import InputError
from paceline.lab.sim.cost_files import timed_steps

CONFIG = EngineConfig(
    kv=KVConfig(block_size=8, num_blocks=50, groups=(GroupSpec(), GroupSpec(window=64, num_blocks=20))),
    scheduler=SchedulerConfig(mode="dynamic", ageing_s=0.1),
    depth=2,
)
SECRET = 1_234_567_890


def result(seq: int, rows: Sequence[int], **columns: Any) -> StepResult:
    ones = np.ones(len(rows), np.int32)
    given = {
        "generation": ones,
        "tokens": np.full((len(rows), 1), SECRET, np.int32),
        "count": ones,
        "finished": np.zeros(len(rows), np.uint8),
        "finite": np.ones(len(rows), np.bool_),
        **columns,
    }
    return StepResult(seq=seq, rows=i32(rows), **given)


def joining(seq: int = 1) -> StepRecord:
    """A step with something in most fields."""
    plan = StepPlan(
        seq=seq,
        leaves=i32([4]),
        joins=RowJoins(
            row=i32([0, 1]),
            generation=i32([1, 3]),
            num_tokens=i32([9, 5]),
            num_computed=i32([8, 0]),
            limit=i32([20, 15]),
            pad=i32([0, 0]),
            model=i32([0, 0]),
            adapter=i32([0, 2]),
            sampling=(SamplingParams(stop_token_ids=(SECRET,)),) * 2,
            tokens=(i32([SECRET] * 9), i32([SECRET] * 5)),
        ),
        spans=RowSpans(row=i32([0, 1]), num_scheduled=i32([1, 5])),
        decode_rows=RowSet(removed=i32([4])),
        new_blocks=BlockAppends(row=i32([0, 1]), group=i32([0, 0]), index=i32([1, 0]), block=i32([7, 8])),
        work=StepWork(prefill_tokens=6, prefill_context_products=24, logit_rows=2),
    )
    keys = (bytes(range(4)), b"\xff\x00")
    one = RequestId(1)
    add = AddRequest(id=one, num_prompt=9, max_tokens=11, arrival_s=0.25, keys=keys, num_tokens=9)
    branch = AddRequest(
        id=RequestId(2),
        num_prompt=5,
        max_tokens=10,
        arrival_s=0.5,
        tenant="a",
        priority=-1,
        deadline_s=9.5,
        parent=one,
        adapter=2,
        num_tokens=6,
        together=2,
    )
    abort = AbortRequest(request=RequestId(3), detail="abort")
    return StepRecord(
        t_plan=0.75,
        t_done=1.0,
        inputs=[(0.5, add), (0.5, branch), (0.6, abort), (0.7, Keys(request=one, keys=keys))],
        plan=plan,
        result=result(seq, [0, 1], generation=i32([1, 3]), times=StepTimes(start_s=0.75, end_s=1.0)),
        decisions=[
            Decision(DecisionKind.ADMIT, RequestId(1), Rule.FITS, 8, seq, 0.75, 100, 7, 2, RequestId(4), 0.5)
        ],
    )


def steady(seq: int, num_rows: int = 1024) -> StepRecord:
    """A step in which every row decodes and nothing changes."""
    plan = StepPlan(seq=seq, work=StepWork(decode_rows=num_rows, decode_context=9000, logit_rows=num_rows))
    return StepRecord(
        t_plan=float(seq),
        t_done=seq + 0.5,
        inputs=[(float(seq), Done(seq=seq - 1))],
        plan=plan,
        result=result(seq, range(num_rows), generation=np.zeros(num_rows, np.int32)),
        decisions=[],
    )


def write_log(path: Path, records: Sequence[StepRecord], **header: object) -> Path:
    writer: StepRecorder = RunLogWriter(path, run_header(CONFIG, **header))
    for record in records:
        writer.step(record)
    writer.close([(2.0, Idle())], [Decision(DecisionKind.DEFER, RequestId(9), Rule.ROWS, 1, 2, 2.0, 55)])
    return path


# -- what a line says --------------------------------------------------------------------------------------


def test_the_lines_of_a_log(tmp_path: Path) -> None:
    lines = write_log(tmp_path / "run.jsonl", [joining()]).read_text().splitlines()
    assert lines[1] == (
        '{"v":2,"seq":1,"t_plan":0.75,"t_done":1.0,"inputs":['
        '["add",0.5,{"id":1,"num_prompt":9,"max_tokens":11,"arrival_s":0.25,"keys":["00010203","ff00"]}],'
        '["add",0.5,{"id":2,"num_prompt":5,"max_tokens":10,"arrival_s":0.5,"tenant":"a","priority":-1,'
        '"deadline_s":9.5,"parent":1,"adapter":2,"num_tokens":6,"together":2}],'
        '["abort",0.6,3,"abort"],["keys",0.7,1,["00010203","ff00"]]],'
        '"plan":{"leaves":[4],"joins":{"row":[0,1],"generation":[1,3],"num_tokens":[9,5],'
        '"num_computed":[8,0],"limit":[20,15],"adapter":[0,2]},"spans":{"row":[0,1],"num_scheduled":[1,5]},'
        '"decode_rows":{"removed":[4]},"new_blocks":{"row":[0,1],"index":[1,0],"block":[7,8]},'
        '"work":{"prefill_tokens":6,"prefill_context_products":24,"logit_rows":2}},'
        '"result":{"rows":"0,1","count":"1,1","times":[0.75,1.0]},'
        '"decisions":[["admit",1,"fits",8,1,0.75,100,7,2,4,0.5]]}'
    )
    assert (
        lines[2] == '{"v":2,"kind":"end","inputs":[["idle",2.0]],"decisions":[["defer",9,"rows",1,2,2.0,55]]}'
    )


def test_the_header_holds_the_whole_config(tmp_path: Path) -> None:
    log = read_run_log(write_log(tmp_path / "run.jsonl", [], seed=7, note={"trace": Path("a/b"), "x": [1]}))
    assert list(log.header) == ["v", "kind", "config", "note", "seed", "version"]
    assert (log.header["v"], log.header["version"], log.header["seed"]) == (2, __version__, 7)
    assert log.header["note"] == {"trace": "a/b", "x": [1]}
    assert log.config == CONFIG
    config = log.header["config"]
    assert set(config) == {spec.name for spec in fields(EngineConfig)}
    assert set(config["kv"]) == {spec.name for spec in fields(KVConfig)}
    assert set(config["scheduler"]) == {spec.name for spec in fields(SchedulerConfig)}
    assert config["kv"]["groups"][1] == {"window": 64, "num_blocks": 20}


def test_a_config_may_be_given_as_it_is_and_older_logs_get_defaults(tmp_path: Path) -> None:
    RunLogWriter(tmp_path / "run.jsonl", {"config": CONFIG, "v": 99, "kind": "x"}).close()
    log = read_run_log(tmp_path / "run.jsonl")
    assert log.config == CONFIG and log.header["version"] == __version__
    old = plain(CONFIG)
    del old["depth"], old["scheduler"]["ageing_s"]
    assert config_of(old).depth == EngineConfig().depth
    assert config_of(old).scheduler.ageing_s == SchedulerConfig().ageing_s


def test_a_steady_step_is_a_short_line_whatever_the_batch(tmp_path: Path) -> None:
    lines = write_log(tmp_path / "run.jsonl", [steady(1, 64), steady(2, 4096)]).read_text().splitlines()
    assert json.loads(lines[2])["result"] == {"rows": "0..4095", "count": "1x4096"}
    assert len(lines[2]) < 220


def test_a_failed_step_has_no_result(tmp_path: Path) -> None:
    record = joining()
    lost = StepRecord(
        t_plan=record.t_plan, t_done=1.5, inputs=(), plan=record.plan, result=None, decisions=()
    )
    (step,) = read_run_log(write_log(tmp_path / "run.jsonl", [lost]))
    assert step.result is None and step.inputs == [] and step.decisions == []


def test_tokens_and_sampling_have_no_place(tmp_path: Path) -> None:
    text = write_log(tmp_path / "run.jsonl", [joining()]).read_text()
    assert str(SECRET) not in text and "sampling" not in text and '"tokens"' not in text
    # A field that is new here needs a look: may it be logged, and does it say all that a replay needs?
    assert set(StepPlan._fields) == {
        *(
            "seq",
            "full",
            "leaves",
            "joins",
            "spans",
            "decode_rows",
            "new_blocks",
            "block_copies",
            "row_copies",
        ),
        *(
            "swap_out",
            "swap_in",
            "store",
            "fetch",
            "drops",
            "encodes",
            "placements",
            "pad_tokens",
            "padding_rows",
            "work",
        ),
        *("draft_width", "draft_tokens", "draft_floor", "trust"),
    }
    assert {spec.name for spec in fields(RowJoins)} == {
        *(
            "row",
            "generation",
            "num_prompt",
            "num_tokens",
            "num_computed",
            "limit",
            "pad",
            "model",
            "adapter",
            "media",
            "texts",
        ),
        *("sampling", "tokens"),
    }
    assert set(StepResult._fields) == {
        *(
            "seq",
            "rows",
            "generation",
            "tokens",
            "count",
            "finished",
            "finite",
            "copies_done",
            "copies_failed",
            "disk_is_off",
            "bad_encodings",
            "logprobs",
            "times",
        ),
        *("verified", "predicted", "drafts"),
        "guided",  # only counted, never logged
        "vectors",  # which rows have one; what it holds is not logged
    }


# -- files -------------------------------------------------------------------------------------------------


def test_an_open_file_is_written_and_stays_open() -> None:
    text = io.StringIO()
    writer = RunLogWriter(text, {})
    writer.step(joining())
    writer.close()
    writer.close()  # a second time changes nothing
    assert len(text.getvalue().splitlines()) == 3


def test_the_log_is_written_as_the_run_goes(tmp_path: Path) -> None:
    writer = RunLogWriter(tmp_path / "run.jsonl", {})
    for seq in range(1, 200):
        writer.step(steady(seq))
    assert (tmp_path / "run.jsonl").stat().st_size > 10_000
    writer.close()


def test_a_compressed_log_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    records = [joining(1), steady(2)]
    one = write_log(tmp_path / "one.jsonl.gz", records).read_bytes()
    assert one == write_log(tmp_path / "two.jsonl.gz", records).read_bytes()
    assert one[4:8] == bytes(4)  # no time
    text = gzip.decompress(one)
    assert text == write_log(tmp_path / "plain.jsonl", records).read_bytes()
    (tmp_path / "no-suffix").write_bytes(one)
    assert [step.seq for step in read_run_log(tmp_path / "no-suffix")] == [1, 2]


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        if self.tell() + len(text) > 900:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_fails_no_step_and_is_told_at_the_end() -> None:
    disk = FullDisk()
    writer = RunLogWriter(disk, {})
    for seq in range(1, 20):
        writer.step(steady(seq))
    num_lines = len(disk.getvalue().splitlines())
    with pytest.raises(InputError, match=f"cut off after line {num_lines}: No space left on device"):
        writer.close()
    assert 2 < num_lines < 10


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write run log .*No such file"):
        RunLogWriter(tmp_path / "nowhere" / "run.jsonl", {})


# -- reading what is not a whole log -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not a Paceline run log: it is empty"),
        (b"hello\n", "is not a Paceline run log: its first line is not a header"),
        (b"[1,2]\n", "its first line is not a header"),
        (b'{"v":2,"seq":1}\n', "its first line is not a header"),
        (b'{"v":"1","kind":"header"}\n', "its first line is not a header"),
        (b'{"v":true,"kind":"header"}\n', "its first line is not a header"),
        (b"[" * 100_000, "its first line is not a header"),
        (b"\xff\xfe\x00\x01\n", "its first line is not a header"),
        (b"\x1f\x8b\x08\x00 and then noise", "its first line cannot be read"),
        (
            b'{"v":3,"kind":"header"}\n',
            "run log of version 3; this program reads version 2: use a newer Paceline",
        ),
    ],
)
def test_a_file_that_is_not_a_log(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_run_log(tmp_path / "file")
    assert "\n" not in str(caught.value) and str(tmp_path / "file") in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read run log .*No such file"):
        read_run_log(tmp_path / "run.jsonl")
    with pytest.raises(InputError, match="cannot read run log .*directory"):
        read_run_log(tmp_path)


def read_into(seen: list[int], log: RunLog) -> None:
    for step in log:
        seen.append(step.seq)


STEP = '{"v":2,"seq":3,"t_plan":1.0,"t_done":2.0,"inputs":[],"plan":{},"result":null,"decisions":[]}'
END = '{"v":2,"kind":"end","inputs":[],"decisions":[]}'


@pytest.mark.parametrize(
    "line, message",
    [
        (STEP[:40], "line 4 is cut off"),
        (STEP, "line 4 is cut off"),  # without the end of the line it may be a beginning
        ("\0\0\0\0", "line 4 is cut off"),
        ("{broken}\n", r"line 4 is broken: not JSON \(Expecting property name"),
        ("[]\n", "line 4 is broken: it is not an object"),
        (STEP.replace('"v":2', '"v":1') + "\n", "line 4 is broken: its version is 1"),
        (STEP.replace('"plan":{},', "") + "\n", "line 4 is broken: 'plan' is missing"),
        (STEP.replace('"plan":{}', '"plan":[]') + "\n", "line 4 is broken: 'seq', 'plan' or 'result'"),
        (
            STEP.replace('"inputs":[]', '"inputs":[3]') + "\n",
            "line 4 is broken: 'inputs' is not a list of entries",
        ),
        (STEP.replace('"t_plan":1.0', '"t_plan":[]') + "\n", r"line 4 is broken: \[\] is not a time"),
        (STEP.replace('"seq":3', '"seq":7') + "\n", "line 4 is broken: step 7 follows step 2"),
        (STEP.replace("null", "\udcff") + "\n", "line 4 is broken: not JSON"),
    ],
)
def test_a_broken_line_is_named_and_the_steps_before_it_can_be_used(
    line: str, message: str, tmp_path: Path
) -> None:
    path = write_log(tmp_path / "run.jsonl", [joining(1), steady(2)])
    whole = path.read_bytes().splitlines(keepends=True)[:-1]
    path.write_bytes(b"".join(whole) + line.encode(errors="surrogateescape"))
    log = read_run_log(path)
    seen: list[int] = []
    with pytest.raises(InputError, match=message + ".*; the 2 steps before it can be used$"):
        read_into(seen, log)
    assert seen == [1, 2]
    lenient = read_run_log(path, allow_cut=True)
    assert [step.seq for step in lenient] == [1, 2]
    assert lenient.damage is not None and lenient.end is None


def test_nothing_may_follow_the_end(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl", [joining(1)])
    with path.open("a") as file:
        file.write(END + "\n")
    with pytest.raises(
        InputError, match="line 4 is broken: it stands after the end of the run; the 1 step before"
    ):
        list(read_run_log(path))


def test_a_compressed_log_that_ends_early(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl.gz", [steady(seq, 8 * seq) for seq in range(1, 300)])
    path.write_bytes(path.read_bytes()[:-400])
    log = read_run_log(path, allow_cut=True)
    num_steps = len(list(log))
    assert 0 < num_steps < 299
    expected = f"line {num_steps + 2} cannot be read; the {num_steps} steps before it can be used"
    assert log.damage is not None and str(log.damage).endswith(expected)


def test_a_log_can_be_read_again_and_knows_whether_it_was_closed(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl", [joining(1), steady(2)])
    log = read_run_log(path)
    assert [step.line for step in log] == [2, 3] == [step.line for step in log]
    assert log.end is not None and log.end.inputs == [["idle", 2.0]]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert len(list(log)) == 2 and log.end is None


# -- samples for a fit -------------------------------------------------------------------------------------


def test_samples_are_the_work_and_seconds_of_timed_steps(tmp_path: Path) -> None:
    untimed = steady(2)
    (step,) = timed_steps(read_run_log(write_log(tmp_path / "run.jsonl", [joining(1), untimed])))
    assert step.seconds == 0.25
    work = step.work
    assert {spec.name: getattr(work, spec.name) for spec in fields(StepWork)} == {
        "decode_rows": 0,
        "decode_context": 0,
        "prefill_tokens": 6,
        "prefill_context_products": 24,
        "logit_rows": 2,
        "swap_blocks": 0,
        "encode_positions": 0,
        "encode_products": 0,
        "placed_tokens": 0,
    }


@pytest.mark.parametrize("times", ["[1.0]", "[1.0,null]", "7", '["soon","later"]'])
def test_samples_with_broken_times(times: str, tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl", [joining(1)])
    path.write_text(path.read_text().replace("[0.75,1.0]", times))
    with pytest.raises(InputError, match="line 2 is broken"):
        timed_steps(read_run_log(path))


def test_a_log_of_the_version_before_serves_a_cost_model_and_nothing_that_asks_why(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl", [joining()])
    path.write_text(path.read_text().replace('{"v":2,', '{"v":1,'))
    log = read_run_log(path)
    assert [step.work.prefill_tokens for step in timed_steps(log)] == [6]
    with pytest.raises(InputError, match=r"run\.jsonl is a run log of version 1.*record the run again"):
        log.check_decisions()
    read_run_log(write_log(tmp_path / "new.jsonl", [])).check_decisions()


def test_a_decision_comes_back_as_it_was() -> None:
    short = Decision(DecisionKind.FINISH, RequestId(3), Rule.STOP, 7, 4, 1.5)
    full = Decision(
        DecisionKind.FAIL, RequestId(3), Rule.FINISH_HOOK, 0, 4, math.inf, 1, 2, 3, RequestId(9), 0.25, "Bad"
    )
    assert encode_decision(short) == ["finish", 3, "stop", 7, 4, 1.5]
    for decision in (short, full):
        assert decode_decision(json.loads(json.dumps(encode_decision(decision)))) == decision
