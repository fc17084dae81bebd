"""GET /v1/requests/{id}/explain: the story of a request, for the key that sent it alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import RequestId
from paceline.errors import QueueFull
from paceline.process.client import EngineUnavailable, Explanation
from paceline.server.access.caller import Caller
from paceline.server.errors import UnknownRequestId
from paceline.server.generate.requests import Explanations, RecentRequests
from tests.pure.server_api.api_helpers import Api, FakeClient, FakeStream, says

ROUTE = "/v1/requests/{id}/explain"
ME, OTHER = Caller(tenant="me"), Caller(tenant="other")


class RememberingClient(FakeClient):
    """Numbers its requests and knows how each began."""

    known = True
    is_live = False
    story: list[Decision] | None = None

    def submit(self, *given: Any, **more: Any) -> FakeStream:
        stream = super().submit(*given, **more)
        stream.first = 10 * len(self.streams)
        return stream

    async def explain(self, number: int) -> Explanation:
        decided = Decision(
            DecisionKind.ADMIT, RequestId(number), Rule.FITS, 0, 3, 1.0, 9, 8, 2, RequestId(4), 0.5
        )
        return Explanation(self.story or ([decided] if self.known else []), self.is_live)


def api() -> Api:
    made = Api(says("hello"))
    made.client = made.service.client = client = RememberingClient(made.client.script)
    made.service.explanations = Explanations(client, made.service.recent)
    return made


def chat(made: Api, caller: Caller = ME, **more: Any) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}
    return str(made.ask("/v1/chat/completions", body, caller=caller)["id"])


def explain(made: Api, request_id: str, caller: Caller = ME) -> Any:
    return made.ask(ROUTE, method="GET", path={"id": request_id}, caller=caller)


def test_the_story_of_a_request() -> None:
    made = api()
    found = explain(made, chat(made))
    assert (found["id"], found["object"]) == ("id1", "request.explanation")
    [branch] = found["branches"]
    assert (branch["index"], branch["number"]) == (0, 10)
    assert branch["sentences"][0].startswith(
        "waited 500 ms for its turn and was admitted at step 3, after request 4"
    )
    assert branch["decisions"][0]["blocks_free"] == 8 and branch["state"] == "ended"
    assert explain(made, "id1") == explain(made, "resp_id1") == found


def test_every_branch_is_told() -> None:
    made = api()
    request_id = chat(made, n=2)
    assert [branch["number"] for branch in explain(made, request_id)["branches"]] == [10, 11]


def test_a_request_is_found_by_the_number_that_the_page_shows() -> None:
    made = api()
    request_id = chat(made, n=2)
    assert explain(made, "10") == explain(made, "11") == explain(made, request_id)
    with pytest.raises(UnknownRequestId, match="id or number"):
        explain(made, "10", OTHER)


def test_an_admin_asks_by_any_number_and_by_id() -> None:
    made, admin = api(), Caller(tenant="operator", is_admin=True)
    request_id = chat(made, n=2)

    def told(name: str) -> dict[str, Any]:
        return asyncio.run(made.service.explanations.explain_any(name, admin))

    assert told("11")["id"] == "id1" and [branch["number"] for branch in told("11")["branches"]] == [11]
    assert told(request_id)["id"] == "id1" and len(told(request_id)["branches"]) == 2
    for unknown in ("٣", "9" * 19, "no such"):
        with pytest.raises(UnknownRequestId):
            told(unknown)


def test_words_of_prompts_are_kept_only_where_they_may_be_shown() -> None:
    made = api()
    recent = made.service.recent
    chat(made)
    assert recent.newest(1)[0].words == ""
    recent.keeps_words = lambda: True
    parts = [{"type": "text", "text": "look  at\nthis " + "x" * 100}]
    chat(made, messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}])
    words = recent.newest(1)[0].words
    assert words.startswith("look at this xxx") and words.endswith("…") and len(words) == 60
    made.ask("/v1/completions", {"model": "tiny", "prompt": "once upon"}, caller=ME)
    assert recent.newest(1)[0].words == "once upon"


def test_an_admin_hears_of_everybodys_requests() -> None:
    made = api()
    found = explain(made, chat(made), Caller(tenant="operator", is_admin=True))
    assert found["branches"] and found == explain(made, "id1")


@pytest.mark.parametrize("request_id, caller", [("chatcmpl-id1", OTHER), ("chatcmpl-id2", ME), ("", ME)])
def test_a_request_of_another_caller_is_as_unknown_as_one_that_never_was(
    request_id: str, caller: Caller
) -> None:
    made = api()
    chat(made)
    with pytest.raises(UnknownRequestId, match="this key has sent no request of that id"):
        explain(made, request_id, caller)


def test_what_the_engine_has_forgotten_is_unknown_too() -> None:
    made = api()
    request_id = chat(made)
    made.client.known = False  # type: ignore[attr-defined]
    with pytest.raises(UnknownRequestId, match="any more"):
        explain(made, request_id)


def test_a_request_that_runs_and_one_that_nothing_was_decided_about_yet() -> None:
    made = api()
    request_id = chat(made)
    made.client.is_live = True  # type: ignore[attr-defined]
    [branch] = explain(made, request_id)["branches"]
    assert (branch["state"], branch["sentences"][-1]) == ("running", "is running now")
    made.client.known = False  # type: ignore[attr-defined]
    [branch] = explain(made, request_id)["branches"]
    assert (branch["state"], branch["sentences"]) == ("waiting", ["is waiting for its turn now"])


def test_only_the_newest_requests_are_kept() -> None:
    async def test() -> None:
        recent = RecentRequests(most=2)
        kept = Explanations(RememberingClient(says("x")), recent)
        for number in range(3):
            recent.note(f"r{number}", ME, [number])
        assert (await kept.explain("r2", ME))["branches"]
        with pytest.raises(UnknownRequestId):
            await kept.explain("r0", ME)

    asyncio.run(test())


def test_a_request_is_found_by_the_beginning_of_its_id_that_the_log_shows() -> None:
    recent = RecentRequests()
    for name, caller in (("0123456789", ME), ("0123456700", OTHER), ("abcdefgh00", ME), ("abcdefgh11", ME)):
        recent.note(name, caller, [1])
    assert recent.find("01234567", ME).id == "0123456789", "the other key's is not looked at"
    assert recent.find("chatcmpl-01234567", OTHER).id == "0123456700"
    for unknown in ("0123456", "abcdefgh", "zzzzzzzz"):
        with pytest.raises(UnknownRequestId):
            recent.find(unknown, ME)


def test_an_engine_that_remembers_nothing_says_so() -> None:
    async def test() -> None:
        recent = RecentRequests()
        kept = Explanations(FakeClient(says("x")), recent)
        recent.note("r", ME, [1])
        with pytest.raises(EngineUnavailable, match="explains nothing"):
            await kept.explain("r", ME)

    asyncio.run(test())


def test_a_request_that_was_rejected_on_arrival_can_be_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    made = api()

    def full(*given: Any) -> None:
        raise QueueFull("no place is free")

    monkeypatch.setattr(made.service.admission, "reserve", full)
    with pytest.raises(QueueFull) as caught:
        chat(made)
    found = explain(made, "id1")
    [branch] = found["branches"]
    assert (branch["state"], branch["decisions"]) == ("refused", [])
    assert branch["sentences"] == [f"was refused on arrival: {caught.value}"]
    with pytest.raises(UnknownRequestId):
        explain(made, "id1", caller=OTHER)


def told(made: Api, *decided: tuple[DecisionKind, Rule], is_live: bool = True) -> tuple[str, str]:
    """The state of a request about which this was decided, and the last sentence of its story."""
    number = RequestId(10)
    made.client.story = [  # type: ignore[attr-defined]
        Decision(kind, number, rule, 0, step, 1.0, 9, 8, 2, RequestId(-1), 0.5)
        for step, (kind, rule) in enumerate(decided)
    ]
    made.client.is_live = is_live  # type: ignore[attr-defined]
    [branch] = explain(made, chat(made))["branches"]
    return branch["state"], branch["sentences"][-1]


def test_what_a_request_does_now() -> None:
    made = api()
    admit, pause = (DecisionKind.ADMIT, Rule.FITS), (DecisionKind.CHANGE, Rule.PAUSED)
    way = (DecisionKind.PREEMPT, Rule.PAUSED_RECOMPUTE)
    assert told(made, admit, way, pause) == told(made, admit, pause, way) == ("paused", "is paused now")
    resumed = (DecisionKind.CHANGE, Rule.RESUMED)
    assert told(made, admit, way, pause, resumed)[0] == "waiting"
    assert told(made, admit, way, pause, resumed, (DecisionKind.RESUME, Rule.FITS))[0] == "running"
    assert told(made, (DecisionKind.CHANGE, Rule.PRIORITY))[0] == "waiting"
    assert told(made, admit, (DecisionKind.CHANGE, Rule.PRIORITY))[0] == "running"
    assert told(made, (DecisionKind.REFUSE, Rule.DEADLINE_IMPOSSIBLE), is_live=False)[0] == "refused"
