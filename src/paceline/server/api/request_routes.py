"""/v1/requests/{id} and /v1/estimate: changing and explaining a request under way; when one would be served."""

from __future__ import annotations

import msgspec

from paceline.errors import InvalidRequest
from paceline.server.api.fields import FLAG, Field, FieldTable, ignored_header, number, whole
from paceline.server.api.openai_fields import CHAT, COMPLETIONS, PRIORITY_KIND
from paceline.server.api.openai_requests import BodyParser, check_caller
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call
from paceline.server.generate.estimates import estimate_body
from paceline.server.generate.requests import Explanations, change_request
from paceline.server.generate.service import Service
from paceline.server.generate.trees import chosen_branch

PATH, ANY_PATH, ESTIMATE = "/v1/requests/{id}", "/v1/admin/requests/{id}/explain", "/v1/estimate"
BRANCH_PATH = "/v1/requests/{id}/{branch}"
LONGEST_MS = 10**9
LARGEST_SCORE = 1e9
TABLE = FieldTable(
    PATH,
    [
        Field("priority", PRIORITY_KIND, "within its class, lower goes first"),
        Field(
            "deadline_ms",
            whole(0, LONGEST_MS),
            "milliseconds from now after which it is ended; 0 for none but the server's own",
        ),
        Field(
            "paused",
            FLAG,
            "true: gives its place and memory back and waits; false: goes on at its old place in the order",
        ),
        Field("end_reasoning", FLAG, "true: its reasoning ends now, and its answer begins"),
        Field(
            "score",
            number(-LARGEST_SCORE, LARGEST_SCORE),
            "among the branches of its tree, the higher goes first and is preempted last",
        ),
    ],
)


def change_routes(service: Service) -> list[Route]:
    async def change(call: Call) -> Answer:
        given = TABLE.read(call.body, strict=True).fields
        if not given:
            raise InvalidRequest(
                "nothing is to be changed; give priority, deadline_ms, paused, end_reasoning or score"
            )
        known = chosen_branch(service.recent.find(call.path["id"], call.caller), call.path.get("branch"))
        found = await change_request(service.client, known, call.caller, **given)
        return Answer(body=msgspec.json.encode(found))

    return [
        described("PATCH", PATH, change, "Change a request under way", TABLE),
        described("PATCH", BRANCH_PATH, change, "Change one branch of a request under way", TABLE),
    ]


def explain_routes(service: Service) -> list[Route]:
    async def explain(call: Call) -> Answer:
        found = await service.explanations.explain(call.path["id"], call.caller)
        return Answer(body=msgspec.json.encode(found))

    summary = "Tell the story of one of your requests"
    return [
        explain_any_route(service.explanations),
        described("GET", f"{PATH}/explain", explain, summary),
    ]


def explain_any_route(explanations: Explanations, path: str = ANY_PATH) -> Route:
    """The story of whatever the engine knows, by its own number or by the id of the answer."""

    async def explain_any(call: Call) -> Answer:
        found = await explanations.explain_any(call.path["id"], call.caller)
        return Answer(body=msgspec.json.encode(found))

    summary = "Tell the story of any request, by its id or the engine's number"
    return described("GET", path, explain_any, summary, needs_admin=True)


def estimate_routes(service: Service) -> list[Route]:
    """Takes what /v1/chat/completions and /v1/completions take."""
    settings = service.settings
    chat, completions = (
        BodyParser(url, settings.limits, strict=settings.strict_fields) for url in (CHAT, COMPLETIONS)
    )

    async def estimate(call: Call) -> Answer:
        service.check_loaded()
        given = call.body
        if ("prompt" in given) == ("messages" in given):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        body = (chat if "messages" in given else completions).parse(given, service.facts)
        check_caller(call.caller, body.model, service.facts)
        if len(body.prompts) > 1:
            raise InvalidRequest("an estimate is of one prompt", param="prompt")
        found = estimate_body(body.model, await service.estimate(call, body))
        return Answer(body=msgspec.json.encode(found), headers=ignored_header(body.ignored))

    summary = "When a request would be served, without running it"
    return [described("POST", ESTIMATE, estimate, summary, chat.table)]
