"""`paceline audit verify | bias`: whether a decision log is whole, and whether groups were treated alike.

Owns flags, tables and exit codes; the chain is in `audit.trail`, the comparison in `audit.bias`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.command import Command, CommandGroup
from paceline.config.options import option
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.audit.bias import GroupComparison
    from paceline.audit.trail import ChainCheck

HELP = "Check a decision log, or compare groups of requests in it."
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
    help=HELP,
    headings={
        "Commands": (
            Command(name="verify", help=VERIFY_HELP, run=_verify, takes=(VerifyOptions,)),
            Command(name="bias", help=BIAS_HELP, run=_bias, takes=(BiasOptions,)),
        )
    },
)
