"""The story of a request: its decisions as plain sentences, and the same as values for JSON.

Repeated decisions of a kind (the parts of a long prompt, a row that stalls for several steps) become one sentence. The
decisions come from the caller, or from a run log, which is read once from the start; a log that may be cut off ends the
story at its first broken line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from paceline.audit.codec import decode_add, decode_decision
from paceline.audit.runlog import RunLog
from paceline.core.dial import format_time
from paceline.core.events import NO_NUMBER, NO_REQUEST, Decision, DecisionKind, Rule
from paceline.core.request import DEFAULT_TENANT, Request, RequestId, account_of
from paceline.core.service_class import DEFAULT_CLASS
from paceline.errors import InputError

_CAUSES = {
    "place": "which goes before it and needed its place",
    "pages": "it held vectors in pages that another request needed",
    "forced": "it was told to",
    "paused": "it was paused",
    "step_failed": "the step it was in failed",
    "sleep": "its model was put to sleep",
    "slab": "another model needed the memory",
}
_ENDS = {
    Rule.STOP: "reached a stop",
    Rule.LENGTH: "reached its length",
    Rule.VECTOR: "has its vector",
    Rule.CONTEXT: "has computed its context",
    Rule.DEADLINE: "was ended: its deadline had passed",
    Rule.PRUNED: "was pruned",
    Rule.HOLD_OVER: "was held at its end, nothing came of it, and it was let go",
    Rule.GRAMMAR_ERROR: "failed: its answer could not follow its structure",
    Rule.GRAMMAR_TOO_COMPLEX: "failed: its structure became too complex",
    Rule.ABORT: "was aborted",
    Rule.ERROR: "failed",
    Rule.NUMERICAL_ERROR: "failed: the model computed numbers that are not finite",
    Rule.INTERNAL_ERROR: "failed inside the engine",
    Rule.ENGINE_FAILED: "failed with the engine",
}
_CUTS = {
    Rule.BUDGET: "the step's tokens were used up",
    Rule.SHARE: "it had the share of a step that one prompt gets while others wait",
    Rule.BLOCKS: "no block was free",
    Rule.GROUP: "its next picture was being encoded",
    Rule.PAGES: "there was no room for the vectors of its next picture",
}
_REFUSALS = {
    Rule.QUEUE_FULL: "the queue was full",
    Rule.CONTEXT_LENGTH: "it asked for more tokens than the model's context holds",
    Rule.PIN_LIMIT: "as much was pinned as may be",
    Rule.TREE_LIMIT: "its tree has as many branches or tokens as it may",
    Rule.MEDIA: "it has pictures that this engine cannot encode",
    Rule.MODULES: "it has contexts that this engine cannot place",
    Rule.POOLING: "it wanted a vector that this engine does not make",
    Rule.KV_KEEP: "it wanted to drop parts of its KV, which this engine cannot do",
    Rule.KV_CAPACITY: "its tokens do not fit into the KV cache even when that is empty",
    Rule.DEADLINE_INFEASIBLE: "the times it wanted could not be kept as things stood",
    Rule.DEADLINE_IMPOSSIBLE: "the times it wanted could not be kept even if it were alone",
}


def story(decisions: Iterable[Decision]) -> list[str]:
    """Sentences about one request, in the order in which things happened."""
    sentences: list[str] = []
    past: list[Decision] = []
    for _, same in groupby(decisions, key=_sentence_of):
        run = list(same)
        if not past and _has_lost_its_beginning(run[0]):
            sentences.append("how it began is no longer known; what is left:")
        sentences.append(_SENTENCES[run[0].kind](run, past))
        past += run
    return sentences


def story_values(decisions: Sequence[Decision]) -> dict[str, Any]:
    """The same for JSON: the sentences, and each decision with the figures that bear on it, by name."""
    return {"sentences": story(decisions), "decisions": [decision_values(each) for each in decisions]}


def decision_values(decision: Decision) -> dict[str, Any]:
    """A decision by name, without what does not bear on it."""
    values: dict[str, Any] = {
        **decision._asdict(),
        "kind": decision.kind.value,
        "reason": decision.reason.value,
    }
    silent: dict[str, Any] = {"budget_left": NO_NUMBER, "blocks_free": NO_NUMBER, "blocks_needed": NO_NUMBER}
    silent |= {"against": NO_REQUEST, "detail": ""}
    if decision.kind is not DecisionKind.ADMIT:
        silent["seconds"] = 0.0
    return {name: value for name, value in values.items() if name not in silent or value != silent[name]}


def _sentence_of(decision: Decision) -> tuple[DecisionKind, Rule | None]:
    """Decisions that make one sentence together. The parts of a prompt do, whatever each of them was cut off by."""
    return decision.kind, None if decision.kind is DecisionKind.CHUNK else decision.reason


def _has_lost_its_beginning(first: Decision) -> bool:
    """A request comes into the record by being admitted, deferred, refused or ended before it has put out anything."""
    if first.kind is DecisionKind.FINISH:
        return first.value > 0
    return first.kind in (DecisionKind.CHUNK, DecisionKind.STALL, DecisionKind.PREEMPT, DecisionKind.RESUME)


# -- sentences ---------------------------------------------------------------------------------------------


def _admit(run: list[Decision], past: list[Decision]) -> str:
    decision = run[0]
    ahead = f", after {_named(decision.against)}" if decision.against != NO_REQUEST else ""
    # A request that was never deferred waited for those before it; a deferred one has its own sentence already.
    was_deferred = any(each.kind is DecisionKind.DEFER for each in past)
    how = " in all" if was_deferred else " for its turn" if ahead else ""
    is_branch = any(each.kind is DecisionKind.FORK for each in past)  # what it found is its parent's
    return (
        f"waited {format_time(decision.seconds)}{how} and was admitted at step {decision.step}{ahead}: "
        f"{_room(decision)}{'' if is_branch else _found(decision)}"
    )


def _route(run: list[Decision], past: list[Decision]) -> str:
    decision = run[-1]
    engine, _, rule = decision.detail.partition(": ")
    cached = f", {_count(decision.value, 'token')} of it cached there" if decision.value else ""
    again = "went on in" if any(each.kind is DecisionKind.FAILOVER for each in past) else "was given to"
    cost = f", first token expected after {format_time(decision.seconds)}" if decision.seconds else ""
    return f"{again} {engine} ({rule}){cached}{cost}"


def _failover(run: list[Decision], past: list[Decision]) -> str:
    decision = run[-1]
    return f"{decision.detail} was lost with it, behind {_count(decision.value, 'token')} of output"


def _resume(run: list[Decision], past: list[Decision]) -> str:
    decision = run[0]
    left = next((each for each in reversed(past) if each.kind is DecisionKind.PREEMPT), None)
    waited = "" if left is None else f" after {format_time(decision.time_s - left.time_s)}"
    if decision.reason is Rule.SWAP:
        how = f"{_count(decision.value, 'token')} of KV copied back from host memory"
    else:
        lost = 0 if left is None else max(0, left.value - decision.value)
        how = f"recomputed {_count(lost, 'token')}, {_were(decision.value, 'token')} still in the cache"
    return f"came back at step {decision.step}{waited}: {how} ({_room(decision)})"


def _fork(run: list[Decision], past: list[Decision]) -> str:
    decision = run[0]
    if decision.reason is Rule.BRANCHED:
        score = f", with {decision.detail}" if decision.detail else ""
        return f"was forked from {_named(decision.against)} behind its first {_count(decision.value, 'token')}{score}"
    return (
        f"branched off {_named(decision.against)} at step {decision.step} and shares the KV of "
        f"{_count(decision.value, 'token')} with it"
    )


def _extend(run: list[Decision], past: list[Decision]) -> str:
    tokens = _count(sum(decision.value for decision in run), "token")
    return f"was extended by {tokens} from outside before step {run[-1].step}"


def _hold(run: list[Decision], past: list[Decision]) -> str:
    decision = run[-1]
    return (
        f"{_ENDS[decision.reason]} after {_count(decision.value, 'token')} of output and was held before step "
        f"{decision.step}, for {format_time(decision.seconds)} at most"
    )


def _defer(run: list[Decision], past: list[Decision]) -> str:
    decision = run[0]
    start = f"had to wait at step {decision.step}: "
    has_other, named = decision.against != NO_REQUEST, _named(decision.against)
    waits = f" (no request was preempted for it: {decision.detail})" if decision.detail else ""
    if decision.reason is Rule.ROWS:
        return f"{start}all rows were taken{f', the last by {named}' if has_other else ''}{waits}"
    if decision.reason is Rule.BUDGET:
        by = f"the prompt of {named} took the last of them" if has_other else "running requests took them"
        return f"{start}the step had no tokens left, {by}"
    if decision.reason is Rule.PREFIX:
        return f"{start}{named} was computing a beginning that it can share"
    if decision.reason is Rule.MODULE:
        return f"{start}a context that it places was not computed yet"
    if decision.reason is Rule.MODULE_EVICTED:
        return f"{start}a context that it places was evicted while it waited, and was computed again before all others"
    if decision.reason is Rule.TREE_ROWS:
        return f"{start}its tree had as many rows as it may"
    if decision.reason is Rule.SWAP:
        return f"{start}its own KV was still being copied to host memory"
    if decision.reason is Rule.ASLEEP:
        return f"had to wait {format_time(decision.seconds)} until step {decision.step}: its model was asleep"
    if decision.reason is Rule.ADAPTER:
        return f"{start}its adapter was not in memory"
    if decision.reason is Rule.LOADING:
        return f"{start}part of its prompt was coming from the disk"
    if decision.reason is Rule.MAKING_ROOM:
        return f"{start}part of its prompt is in host memory, and the blocks it will take were being copied there"
    if decision.reason is Rule.SPARE and decision.blocks_needed == NO_NUMBER:
        return f"{start}the rows that are left are kept for tenants with less to do than its own"
    kept_for = "tenants with less to do than its own" if decision.reason is Rule.SPARE else "others"
    kept = f" ({decision.value:,} kept for {kept_for})" if decision.value else ""
    ahead = f", {named} was ahead" if has_other else ""
    what = "needed for its full length" if decision.reason is Rule.RESERVE else "needed"
    return (
        f"{start}{_were(decision.blocks_needed, 'block')} {what}, {_free(decision.blocks_free)}{kept}{ahead}"
        f"{waits}"
    )


def _load(run: list[Decision], past: list[Decision]) -> str:
    decision = run[-1]
    tokens, when = _count(decision.value, "token"), f"at step {decision.step}"
    has_fetched = any(each.reason is Rule.LOADING for each in (*past, *run))
    if decision.reason is Rule.LOAD_FAILED:
        return f"{tokens} of KV could not be copied to the device before step {decision.step}: to be computed"
    what = {
        Rule.LOADS: f"{tokens} of its prompt came from {'the disk' if has_fetched else 'host memory'} {when}",
        Rule.LOADING: f"waited for {tokens} of its prompt from the disk {when}",
        Rule.MAKING_ROOM: f"waited {when} for room to load {tokens} of its prompt",
    }.get(decision.reason, f"computed {tokens} of its prompt {when} that host memory has")
    return f"{what} (expected: {decision.detail})"


def _chunk(run: list[Decision], past: list[Decision]) -> str:
    # Of the parts of a step the last says why it ended.
    ends = {decision.step: decision.reason for decision in run}
    steps, reasons = list(ends), [reason for reason in _CUTS if reason in ends.values()]
    tokens = _count(sum(decision.value for decision in run), "token")
    why = " or ".join(_CUTS[reason] for reason in reasons)
    if len(steps) == 1:
        return f"computed {tokens} of its prompt at step {steps[0]} and no more: {why}"
    return (
        f"computed {tokens} of its prompt in parts from step {steps[0]} to step {steps[-1]}, each until {why}"
    )


def _encode(run: list[Decision], past: list[Decision]) -> str:
    how = "was encoded" if run[0].reason is Rule.ENCODED else "was found encoded"
    return "; ".join(f"its {_words(each)} {how} {each.detail.partition(': ')[2]}" for each in run)


def _place(run: list[Decision], past: list[Decision]) -> str:
    return "; ".join(
        f"{_count(each.value, 'token')} of its {_of(each)} were copied to their place at step {each.step}, "
        f"{each.detail.partition(': ')[2]}"
        for each in run
    )


def _of(decision: Decision) -> str:
    return decision.detail.partition(": ")[0]


def _words(decision: Decision) -> str:
    return f"{decision.detail.partition(': ')[0]} ({_count(decision.value, 'token')})"


def _pin(run: list[Decision], past: list[Decision]) -> str:
    decision = run[-1]
    what = "of a context" if decision.reason is Rule.CONTEXT else "of its prompt"
    return (
        f"the first {_count(decision.value, 'token')} {what} ({_count(decision.blocks_needed, 'block')}) were pinned "
        f"before step {decision.step}, for {format_time(decision.seconds)}"
    )


def _unpin(run: list[Decision], past: list[Decision]) -> str:
    decision = run[-1]
    return (
        f"the pin of its first {_count(decision.value, 'token')} ended before step {decision.step}: "
        f"{_UNPINNED[decision.reason]}"
    )


_UNPINNED = {
    Rule.OVER: "its time was over",
    Rule.DELETED: "it was deleted",
    Rule.LOST: "its blocks were lost with a step, a sleep or the cache",
}


def _stall(run: list[Decision], past: list[Decision]) -> str:
    decision, last = run[0], run[-1]
    when = (
        f"at step {decision.step}"
        if last.step == decision.step
        else f"from step {decision.step} to step {last.step}"
    )
    ahead = f", {_named(decision.against)} got one before it" if decision.against != NO_REQUEST else ""
    return f"stood still {when}: a block was needed, {_free(decision.blocks_free)}{ahead}"


def _preempt(run: list[Decision], past: list[Decision]) -> str:
    return "; ".join(map(_preempted, run))


def _preempted(decision: Decision) -> str:
    cause, kind = decision.reason.value.split(":")
    to = f" for {_named(decision.against)}" if decision.against != NO_REQUEST else ""
    short = f"{_were(decision.blocks_free, 'block')} free, {decision.blocks_needed:,} more needed"
    why = short if cause == "blocks" else _CAUSES[cause]
    after = "copied to host memory" if kind == "swap" else "to be recomputed"
    cost = f"; expected: {decision.detail}" if decision.detail else ""
    return f"was preempted at step {decision.step}{to}: {why} ({_count(decision.value, 'token')} of KV {after}{cost})"


def _change(run: list[Decision], past: list[Decision]) -> str:
    decision = run[-1]
    when = f"before step {decision.step}"
    if decision.reason is Rule.PRIORITY:
        return f"was given priority {decision.value} {when}"
    if decision.reason is Rule.SCORE:
        return f"was given the score {decision.detail} {when}"
    if decision.reason is Rule.DEADLINE:
        until = "no deadline" if not decision.detail else f"a deadline {decision.detail} away"
        return f"was given {until} {when}"
    return f"was {'paused' if decision.reason is Rule.PAUSED else 'let go on'} {when}"


def _finish(run: list[Decision], past: list[Decision]) -> str:
    decision = run[0]
    detail = f" ({decision.detail})" if decision.detail else ""
    after = _count(decision.value, "token")
    return f"{_ENDS[decision.reason]}{detail} after {after} of output, before step {decision.step}"


def _refuse(run: list[Decision], past: list[Decision]) -> str:
    decision = run[0]
    return f"was refused: {_REFUSALS[decision.reason]} ({_were(decision.value, 'token')} asked for)"


def _fail(run: list[Decision], past: list[Decision]) -> str:
    what = "letting go of it" if run[0].reason is Rule.FINISH_HOOK else "handling it"
    return f"{what} raised {run[0].detail}; no other request was touched"


def _steered(run: list[Decision], past: list[Decision]) -> str:
    what = _STEERED[run[0].kind]
    moves = "; ".join(f"{each.reason.value} at step {each.step}: {each.detail}" for each in run)
    return f"{what} was moved ({moves})"


_STEERED = {
    DecisionKind.DIAL: "the dial",
    DecisionKind.POLICY: "the policy",
    DecisionKind.DRAFT: "the number of drafts",
}
_SENTENCES: dict[DecisionKind, Callable[[list[Decision], list[Decision]], str]] = {
    DecisionKind.ADMIT: _admit,
    DecisionKind.RESUME: _resume,
    DecisionKind.FORK: _fork,
    DecisionKind.EXTEND: _extend,
    DecisionKind.HOLD: _hold,
    DecisionKind.DEFER: _defer,
    DecisionKind.LOAD: _load,
    DecisionKind.CHUNK: _chunk,
    DecisionKind.ENCODE: _encode,
    DecisionKind.PLACE: _place,
    DecisionKind.ROUTE: _route,
    DecisionKind.FAILOVER: _failover,
    DecisionKind.PIN: _pin,
    DecisionKind.UNPIN: _unpin,
    DecisionKind.STALL: _stall,
    DecisionKind.PREEMPT: _preempt,
    DecisionKind.CHANGE: _change,
    DecisionKind.FINISH: _finish,
    DecisionKind.REFUSE: _refuse,
    DecisionKind.FAIL: _fail,
    DecisionKind.DIAL: _steered,
    DecisionKind.POLICY: _steered,
    DecisionKind.DRAFT: _steered,
}


# -- words -------------------------------------------------------------------------------------------------


def _room(decision: Decision) -> str:
    needed, free = _count(decision.blocks_needed, "block"), decision.blocks_free
    return f"{needed} needed, {free} free, {_count(decision.budget_left, 'token')} of the step left"


def _found(decision: Decision) -> str:
    return f"; {_were(decision.value, 'token')} in the cache already" if decision.value else ""


def _named(request_id: RequestId) -> str:
    return f"request {request_id}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _were(number: int, noun: str) -> str:
    return f"{_count(number, noun)} {'was' if number == 1 else 'were'}"


def _free(number: int) -> str:
    return f"{number:,} {'was' if number == 1 else 'were'} free"


# -- a request of a run log: how it came, and every decision about it ----------------------------------------

_BROKEN = (ValueError, KeyError, TypeError, IndexError)  # what reading a line that makes no sense raises


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One request of a log."""

    request: Request  # as it was added; its tokens are zeros
    decisions: tuple[Decision, ...]
    is_whole: bool  # the log was closed: nothing can be missing at its end
    damage: str = ""  # where a log that may be cut off is broken

    def sentences(self) -> list[str]:
        sentences = [self._arrival(), *story(self.decisions)]
        if self.damage:
            sentences.append(f"the log goes no further: {self.damage}")
        elif not self.is_whole:
            sentences.append("the log was not closed: what came after its last step is not in it")
        return sentences

    def values(self) -> dict[str, Any]:
        request = self.request
        facts = {
            "id": int(request.id),
            "arrival_s": request.arrival_s,
            "num_prompt": request.num_prompt,
            "max_tokens": request.sampling.max_tokens,
            "tenant": request.tenant,
            "service_class": request.service_level.service_class,
            "priority": request.service_level.priority,
            "parent": request.parent,
        }
        values = story_values(self.decisions)
        return {"request": facts, **values, "sentences": self.sentences(), "is_whole": self.is_whole}

    def _arrival(self) -> str:
        request = self.request
        tenant = account_of(request.tenant)
        owner = "" if tenant == DEFAULT_TENANT else f" of {tenant}"
        service = (
            f", of class {request.service_level.service_class}"
            if request.service_level.service_class != DEFAULT_CLASS
            else ""
        )
        priority = f", priority {request.service_level.priority}" if request.service_level.priority else ""
        branch = "" if request.parent is None else f", a branch of request {request.parent}"
        pooled = request.sampling.pooling
        wanted = (
            f"up to {request.sampling.max_tokens:,} more" if pooled is None else f"a vector ({pooled.kind})"
        )
        return (
            f"request {request.id}{owner} came at {request.arrival_s:.3f} s with {request.num_prompt:,} tokens of "
            f"prompt and asked for {wanted}{service}{priority}{branch}"
        )


def explain_from_log(log: RunLog, request_id: int) -> LoggedRequest:
    """Everything a log says about a request. Raises InputError when it knows none of that number."""
    log.check_decisions()
    found: Request | None = None
    seen: list[int] = []
    decisions: list[Decision] = []
    for line in log.lines():
        try:
            added = {values[0]["id"]: values[0] for kind, _, *values in line.inputs if kind == "add"}
            seen.extend(added)
            if request_id in added:
                found = decode_add(added[request_id]).make_request()
            decisions.extend(decode_decision(entry) for entry in line.decisions if entry[1] == request_id)
        except _BROKEN as problem:
            raise InputError(f"{log.path}: line {line.line} is broken: {problem}") from problem
    if found is None:
        known = f"its requests are {min(seen)} to {max(seen)}" if seen else "it holds no request at all"
        raise InputError(f"{log.path} knows no request {request_id}: {known}")
    damage = "" if log.damage is None else str(log.damage)
    return LoggedRequest(
        request=found, decisions=tuple(decisions), is_whole=log.end is not None, damage=damage
    )
