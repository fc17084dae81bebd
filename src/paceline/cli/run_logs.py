"""`paceline replay | explain | trace | audit`: what a run log and a decision log tell.

Owns the flags, what is printed and the exit codes. A run is replayed by `lab.sim.replayer`, a request explained by
`audit.story`, a timeline made by `audit.chrome_trace`. `explain` asks a server as well, with the key in the
environment. The chain of a decision log is in `audit.trail`, the comparison of groups in `audit.bias`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.command import Command
from paceline.cli.show import ShowOptions, page_port, show_page
from paceline.cli.terminal import status_line
from paceline.config.options import from_values, option
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.audit.runlog import RunLog
    from paceline.lab.sim.replayer import ReplayReport
    from paceline.policy import Policy
    from paceline.server.live.recording import Recording
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.cli.command import CommandGroup

if TYPE_CHECKING:
    from paceline.audit.bias import GroupComparison
    from paceline.audit.trail import ChainCheck


# -- replay --------------------------------------------------------------------------------------------------

PROGRESS_STEPS = 200
REPLAY_HELP = """
Replay a run log and check that every decision is the same.

The scheduler gets every input and result of the log at its recorded time. Prints "identical", or the first difference
between its plans and decisions and the recorded ones.

  paceline sim --rate 20 --log run.jsonl.gz
  paceline serve --run-log run.jsonl.gz
  paceline replay run.jsonl.gz
  paceline replay run.jsonl.gz --ui

--ui plays the run on the live page, step by step, as far as it is identical.

The log of a server that was killed can end in the middle of a line: --allow-cut replays everything before it.
Exits with 0 if everything is identical, 1 if something differs, 2 if the file cannot be replayed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What `paceline replay` takes."""

    log: str = option("", "run log to replay", argument=True, metavar="LOG")
    output: str = option(
        "", "write the log of the replay to this file; it is identical if nothing differs", metavar="FILE"
    )
    allow_cut: bool = option(False, "replay the steps before a broken or incomplete line")
    scheduling_policy: str = option(
        "",
        "module:Class of the policy, for runs with a policy of your own; a log never decides what is imported",
        metavar="MODULE:CLASS",
    )
    json: bool = option(False, "print the result as one JSON object")


def _replay(values: Mapping[str, Any]) -> None:
    options = from_values(ReplayOptions, values)
    if not options.log:
        raise InputError("say which log to replay: paceline replay run.jsonl.gz")

    from paceline.audit.runlog import read_run_log

    log = read_run_log(options.log, allow_cut=options.allow_cut)
    policy = None
    if options.scheduling_policy:
        from paceline.scheduler.policy import load_policy

        policy = load_policy(options.scheduling_policy, log.config.scheduler)
    with page_port(from_values(ShowOptions, values)) as bound:
        recording = None if bound is None else _recording(log)
        report = _replayed(log, options, policy, recording)
        print(_as_json(log, report) if options.json else _sentence(log, report))
        if bound is not None and recording is not None:
            if not report.num_steps:
                raise InputError(f"{options.log} has no step that could be shown")
            show_page([recording], bound)
    if not report.is_equal:
        raise SystemExit(1)


def _recording(log: RunLog) -> Recording:
    from paceline.server.live.recording import Recording

    return Recording(log.path.name, num_rows=log.config.scheduler.max_num_seqs, device="recorded")


def _replayed(
    log: RunLog, options: ReplayOptions, policy: Policy | None, recording: Recording | None
) -> ReplayReport:
    from paceline.audit.runlog import CutLog
    from paceline.lab.sim.replayer import replay

    watch = None if recording is None else recording.watch
    try:
        with status_line("replaying") as show:  # the number of steps is not known before the end

            def on_step(num_steps: int) -> None:
                if num_steps % PROGRESS_STEPS == 0:
                    show(f"replaying: {num_steps:,} steps")

            return replay(log, output=options.output or None, policy=policy, watch=watch, on_progress=on_step)
    except CutLog as problem:
        raise InputError(f"{problem}; --allow-cut replays them") from problem


def _sentence(log: RunLog, report: ReplayReport) -> str:
    steps = f"{report.num_steps:,} step{'' if report.num_steps == 1 else 's'}"
    if report.difference is not None:
        return f"different after {steps} that were identical: {report.difference}"
    if log.damage is not None:
        return f"identical: {steps}, up to the damage ({log.damage})"
    return f"identical: {steps}{'' if report.complete else '; the log was not closed'}"


def _as_json(log: RunLog, report: ReplayReport) -> str:
    difference = None if report.difference is None else asdict(report.difference)
    values = {
        "identical": report.is_equal,
        "num_steps": report.num_steps,
        "complete": report.complete,
        "difference": difference,
        "damage": None if log.damage is None else str(log.damage),
    }
    return json.dumps(values, indent=2)


REPLAY = Command(name="replay", help=REPLAY_HELP, run=_replay, takes=(ReplayOptions, ShowOptions))


# -- explain -------------------------------------------------------------------------------------------------

EXPLAIN_HELP = """
Explain why a request waited, was preempted or was rejected.

  paceline sim --rate 20 --log run.jsonl.gz
  paceline explain 17 --log run.jsonl.gz
  paceline explain chatcmpl-3f2a... --url http://localhost:8000
  paceline explain 42 --url http://localhost:8000

A server takes the id of an answer or the number that the live page shows. It is asked with the key in PACELINE_API_KEY,
and tells only about requests of that key.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """What `paceline explain` takes."""

    request: str = option(
        "",
        "number of the request, in a log or on a server's live page, or the id of a server's answer",
        argument=True,
        metavar="ID",
    )
    log: str = option("", "run log it is in", metavar="FILE")
    url: str = option("", "server it was sent to", metavar="URL")
    json: bool = option(False, "print one JSON object: the sentences, and every decision by name")


def _explain(given: Mapping[str, Any]) -> None:
    options = ExplainOptions(**given)
    if not options.request:
        raise InputError("say which request: paceline explain 17 --log run.jsonl.gz")
    if bool(options.log) == bool(options.url):
        raise InputError("say where the request is: --log FILE names a run log, --url URL a server")
    values, sentences = _explained_by_server(options) if options.url else _explained_by_log(options)
    if options.json:
        print(json.dumps(values, indent=2))
    else:
        for sentence in sentences:
            print(sentence)


def _explained_by_log(options: ExplainOptions) -> tuple[dict[str, Any], list[str]]:
    if not options.request.isascii() or not options.request.isdigit():
        raise InputError(f"{options.request} is no number; a run log numbers its requests")

    from paceline.audit.runlog import read_run_log
    from paceline.audit.story import explain_from_log

    # The log of a server that runs, or was killed, ends anywhere; the story then says that it may go on.
    found = explain_from_log(read_run_log(options.log, allow_cut=True), int(options.request))
    return found.values(), found.sentences()


def _explained_by_server(options: ExplainOptions) -> tuple[dict[str, Any], list[str]]:
    from paceline.cli.remote import Remote

    values = Remote(options.url, None).explain(options.request)
    sentences: list[str] = []
    for branch in values["branches"]:
        own = f", branch {branch['index']}" if len(values["branches"]) > 1 else ""
        number = branch.get("number")  # a request refused on arrival has none
        sentences.append(
            f"request {number} of the engine{own}:" if number is not None else f"request {values['id']}:"
        )
        sentences += branch["sentences"]
    return values, sentences


EXPLAIN = Command(name="explain", help=EXPLAIN_HELP, run=_explain, takes=(ExplainOptions,))


# -- trace ---------------------------------------------------------------------------------------------------

TRACE_HELP = """
Draw a run log as a timeline, for Perfetto.

Writes a Chrome trace: one track for each row with prefill, decode and preemption, one for each request with its
waiting, and counters for rows, waiting requests and KV blocks.

  paceline serve --run-log run.jsonl.gz
  paceline trace run.jsonl.gz -o trace.json.gz

Open it in https://ui.perfetto.dev, which runs in the browser and uploads nothing, or in chrome://tracing. The log of a
server that is still running, or was killed, is drawn as far as it goes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What `paceline trace` takes."""

    log: str = option("", "run log to draw", argument=True, metavar="LOG")
    output: str = option("trace.json.gz", "file to write; .gz: compressed", also=("-o",), metavar="FILE")


def _trace(values: Mapping[str, Any]) -> None:
    options = TraceOptions(**values)
    if not options.log:
        raise InputError("say which log to draw: paceline trace run.jsonl.gz -o trace.json.gz")

    from paceline.audit.chrome_trace import write_trace
    from paceline.audit.runlog import read_run_log

    log = read_run_log(options.log, allow_cut=True)
    log.check_decisions()
    if Path(options.output).resolve() == Path(options.log).resolve():
        raise InputError(f"{options.output} is the log itself; write the trace to another file")
    count = write_trace(log, options.output)
    print(f"Wrote {count:,} events to {options.output}; open it in https://ui.perfetto.dev")
    if log.is_unfinished:
        print(
            "The log has no end yet: its server is still running or was killed, or the log reached --run-log-bytes. "
            "The trace has all steps so far."
        )
    elif log.damage is not None:
        print(f"The trace ends where the log is damaged: {log.damage}", file=sys.stderr)


TRACE = Command(name="trace", help=TRACE_HELP, run=_trace, takes=(TraceOptions,))


# -- audit ---------------------------------------------------------------------------------------------------

AUDIT_HELP = "Check a decision log, or compare groups of requests in it."
UNLIKELY = 0.01  # a chance below which a difference is put into words
VERIFY_HELP = """
Check that a decision log was not changed.

Every page of decisions holds the hash of the page before it, so that a changed, removed or inserted page is found.
Exits with 0 if the chain is whole, 1 if it is not, 2 if there is no log.

  paceline audit verify decisions/
  paceline audit verify decisions/ --head HASH

Pages removed from the end are found only with --head: keep the hash that is printed, and give it the next time.
"""
BIAS_HELP = """
Compare the waiting and preemptions of groups of requests.

Groups are keys, classes or prompt lengths. Each is compared with all others by a rank test, corrected for the number of
comparisons.

  paceline audit bias decisions/ --by key,class,length
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `paceline audit verify` takes."""

    folder: str = option("", "folder of the decision log", argument=True, metavar="DIR")
    head: str = option("", "hash that an earlier run printed; its page must still exist", metavar="HASH")


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasOptions:
    """What `paceline audit bias` takes."""

    folder: str = option("", "folder of the decision log", argument=True, metavar="DIR")
    by: str = option(
        "key,class,length", "what to compare by: key, class, length; several: separated by commas"
    )
    json: bool = option(False, "print one JSON object")


def _verify(values: Mapping[str, Any]) -> None:
    options = VerifyOptions(**values)

    from paceline.audit.trail import verify

    found = verify(_named(options.folder), options.head)
    if found.undone:
        print("note: a write was interrupted by the end of its process, and does not count")
    if found.problem:
        is_one = found.first is not None and found.first.page == found.end.page
        verb = "is" if is_one else "are"
        before = "" if found.first is None else f"; {_pages(found)} before it {verb} whole"
        print(f"broken: {found.problem}{before}")
        raise SystemExit(1)
    if found.first is None:
        print("whole: there is no decision yet")
        return
    removed = found.first.first - 1
    gone = f"; {removed:,} decisions before them were removed by age or number" if removed else ""
    print(f"whole: {found.num_entries:,} decisions in {_pages(found)}{gone}")
    print(f"head: {found.end.hash}")


def _pages(found: ChainCheck) -> str:
    assert found.first is not None
    first, last = found.first.page, found.end.page
    return f"page {first:,}" if first == last else f"pages {first:,} to {last:,}"


def _bias(values: Mapping[str, Any]) -> None:
    options = BiasOptions(**values)

    from paceline.audit.bias import LEAST, compare, requests_of
    from paceline.audit.trail import TrailReader

    requests = requests_of(page.body for page in TrailReader(_named(options.folder)))
    by = [part.strip() for part in options.by.split(",") if part.strip()]
    found = compare(requests, by)
    if options.json:
        shown = {"num_requests": len(requests), "comparisons": [asdict(each) for each in found]}
        print(json.dumps(shown, indent=2))
        return
    lines = _bias_lines(len(requests), found)
    left_out = [name for name in by if found and name not in {each.by for each in found}]
    if left_out:
        lines.insert(
            -1, f"{', '.join(left_out)}: no two groups are large enough ({LEAST} requests each, at least)"
        )
    for line in lines:
        print(line)


def _bias_lines(num_requests: int, found: Sequence[GroupComparison]) -> list[str]:
    """The table, what its columns mean, and what it comes to in words."""
    lines = [f"{num_requests:,} requests that were admitted and have ended"]
    if not found:
        return [*lines, "no two groups are large enough to be compared (8 requests each, at least)"]
    head = f"{'by':<8}{'group':<24}{'of':<13}{'requests':>9}{'mean':>11}{'others':>11}{'higher':>8}{'chance':>10}"
    lines.append(head)
    for each in found:
        lines.append(
            f"{each.by:<8}{each.group[:23]:<24}{each.measure:<13}{each.count:>9,}{each.mean:>11.4f}"
            f"{each.mean_others:>11.4f}{each.higher:>8.0%}{each.chance:>10.2g}"
        )
    lines.append(
        "higher: how often a request of the group has more of it than one of the others; 50% is no difference"
    )
    lines.append(
        "chance: how often luck alone gives a difference like this, with all comparisons taken into account"
    )
    odd = [each for each in found if each.chance < UNLIKELY]
    for each in odd:
        more = "more" if each.higher > 0.5 else "less"
        what = "waiting" if each.measure == "delay_s" else "preemption"
        lines.append(f"{each.by} {each.group}: {more} {what} than the others, and luck does not explain it")
    return (
        lines
        if odd
        else [*lines, f"no difference that luck does not explain (a chance under {UNLIKELY:.0%})"]
    )


def _named(folder: str) -> str:
    if not folder:
        raise InputError("say which log: the folder that was given to --decision-log")
    return folder


AUDIT = CommandGroup(
    name="audit",
    help=AUDIT_HELP,
    headings={
        "Commands": (
            Command(name="verify", help=VERIFY_HELP, run=_verify, takes=(VerifyOptions,)),
            Command(name="bias", help=BIAS_HELP, run=_bias, takes=(BiasOptions,)),
        )
    },
)
