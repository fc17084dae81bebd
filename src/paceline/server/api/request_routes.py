"""/v1/requests/{id} and /v1/estimate: changing and explaining a request under way, its branches; when one would be
served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from paceline.core.sampling import Offer, offered
from paceline.errors import InvalidRequest
from paceline.server.api.fields import (
    FLAG,
    Field,
    FieldTable,
    GivenFields,
    ignored_header,
    list_of,
    number,
    shaped,
    whole,
)
from paceline.server.api.generation_route import read_body
from paceline.server.api.openai_fields import (
    CHAT,
    COMPLETIONS,
    LARGEST,
    PRIORITY_KIND,
    TOKEN_IDS,
    context_reuse_field,
    kind_of,
    sampling_fields,
)
from paceline.server.api.openai_requests import BodyParser, ParsedBody
from paceline.server.api.openai_routes import OpenAIRoute
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call, Events
from paceline.server.generate.estimates import estimate_body
from paceline.server.generate.generation import Generation
from paceline.server.generate.requests import Explanations, change_request
from paceline.server.generate.service import Service
from paceline.server.generate.trees import ForkAsked, LiveBranch, chosen_branch, prune, show_tree

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
        if ("prompt" in call.body) == ("messages" in call.body):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        parser = chat if "messages" in call.body else completions
        body = read_body(service, call, lambda given: parser.parse(given, service.facts))
        if len(body.prompts) > 1:
            raise InvalidRequest("an estimate is of one prompt", param="prompt")
        found = estimate_body(body.model, await service.estimate(call, body))
        return Answer(body=msgspec.json.encode(found), headers=ignored_header(body.ignored))

    summary = "When a request would be served, without running it"
    return [described("POST", ESTIMATE, estimate, summary, chat.table)]


# /v1/requests/{id}/fork, /extend, /prune and /tree: live trees over HTTP.
#
# Each takes a branch too, as in /v1/requests/{id}/3/fork. A fork is answered in the format of its parent; branches of
# /v1/responses and /v1/messages in that of /v1/chat/completions, because theirs have one answer only.


FORK, EXTEND = "/v1/requests/{id}/fork", "/v1/requests/{id}/extend"
PRUNE, TREE = "/v1/requests/{id}/prune", "/v1/requests/{id}/tree"
INSERTED = shaped((str, list), "a text or a list of token ids", {"anyOf": [{"type": "string"}, TOKEN_IDS]})
# Over HTTP, a branch may differ in what is one value, and in its stop strings.
CHANGES = {spec.name for spec in offered(Offer.FORK)} - {"logit_bias", "stop_token_ids"}


def _fork_table(service: Service) -> FieldTable:
    limits = service.settings.limits
    sampling = [field for field in sampling_fields(limits) if field.name in CHANGES]
    holding = [
        Field(spec.name, kind_of(spec), spec.help) for spec in offered(Offer.SERVER) if spec.name in CHANGES
    ]
    return FieldTable(
        FORK,
        [
            Field("n", whole(1, limits.branches), "branches to make (default 1)"),
            Field("append", INSERTED, "text or token ids to put behind what the branch has"),
            Field("at", whole(0, LARGEST), "output tokens of the branch to begin with; default: all it has"),
            Field(
                "max_tokens", whole(1, limits.answer_tokens), "of a branch; default: what its parent has left"
            ),
            Field("score", number(-LARGEST_SCORE, LARGEST_SCORE), "among the branches of the tree"),
            Field("stream", FLAG, "send the branches as they are made"),
            *sampling,
            *holding,
        ],
    )


MOST_PARTS = 64
PART = shaped((dict,), "an object with a type", {"type": "object"})
EXTEND_TABLE = FieldTable(
    EXTEND,
    [
        Field("text", shaped((str,), "a text", {"type": "string"}), "to put behind what the branch has"),
        Field("tokens", list_of(whole(0, LARGEST), 1_000_000), "the same as token ids"),
        Field("content", list_of(PART, MOST_PARTS, 1), "the same as parts of the types text and context"),
        context_reuse_field(),
        Field(
            "max_tokens", whole(1, LARGEST), "that it may generate from here on; default: what it has left"
        ),
    ],
)
INSERTING = ("text", "tokens", "content")
PRUNE_TABLE = FieldTable(
    PRUNE, [Field("branches", list_of(whole(0, LARGEST), 256, 1), "indexes of branches to end; default: all")]
)


class _ForkRoute(OpenAIRoute):
    """Shapes the answer of a fork, as its parent's is shaped."""

    def __init__(self, service: Service, url: str, asked: ForkAsked, live: LiveBranch, call: Call) -> None:
        super().__init__(service, url)
        self._asked, self._live = asked, live
        self._known = chosen(service, call)

    def parse(self, given: Any) -> ParsedBody:
        body = self._live.body
        return replace(
            body,
            is_stream=self._asked.is_stream,
            echoes_prompt=False,
            only_echoes=False,
            shows_prompt_logprobs=False,
        )

    async def start(self, call: Call, body: ParsedBody) -> Generation:
        return await self.service.fork(call, self._known, self._live, self._asked)


def chosen(service: Service, call: Call) -> Any:
    known = service.recent.find(call.path["id"], call.caller)
    return chosen_branch(known, call.path.get("branch"))


def _asked(read: GivenFields) -> ForkAsked:
    given = read.fields
    changes = {name: given[name] for name in CHANGES if name in given}
    is_stream = given.get("stream", False)
    if changes.get("on_stop") == "hold" and not is_stream:
        raise InvalidRequest(
            "an answer can be held only while it is streamed: set stream to true", param="on_stop"
        )
    if not is_stream:
        changes["on_stop"] = "end"
    stop = changes.get("stop")
    if stop is not None:
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return ForkAsked(
        count=given.get("n", 1),
        at=given.get("at"),
        append=given.get("append", ""),
        score=float(given.get("score", 0.0)),
        is_stream=is_stream,
        changes=changes,
    )


def tree_routes(service: Service) -> list[Route]:
    table = _fork_table(service)

    async def fork(call: Call) -> Answer | Events:
        asked = _asked(table.read(call.body, strict=True))
        live = service.live.find(chosen(service, call))
        url = COMPLETIONS if live.route == COMPLETIONS else CHAT
        return await _ForkRoute(service, url, asked, live, call).answer(call)

    async def extend(call: Call) -> Answer:
        service.check_loaded()
        given = EXTEND_TABLE.read(call.body, strict=True).fields
        if sum(name in given for name in INSERTING) > 1:
            raise InvalidRequest("give text, tokens or content, and not several of them", param="tokens")
        if given.keys() <= {"context_reuse"}:
            raise InvalidRequest("give text, tokens, content or max_tokens", param="text")
        known = chosen(service, call)
        live = service.live.find(known)
        texts, max_tokens = (
            service.contexts.inserted(given.get("content", ()), call.caller),
            given.get("max_tokens"),
        )
        if texts and given.get("context_reuse") == "blend":
            count = await service.extend_placed(live, texts, max_tokens)
        else:
            plain = "\n".join(each.text for each in texts)
            count = await service.extend(live, given.get("text", given.get("tokens", plain)), max_tokens)
        found = {"id": f"{known.id}/{live.index}", "object": "request.extension", "tokens": count}
        return Answer(body=msgspec.json.encode(found))

    async def end(call: Call) -> Answer:
        given = PRUNE_TABLE.read(call.body, strict=True).fields
        known = service.recent.find(call.path["id"], call.caller)
        found = await prune(service.client, known, given.get("branches"))
        return Answer(body=msgspec.json.encode(found))

    async def show(call: Call) -> Answer:
        known = service.recent.find(call.path["id"], call.caller)
        return Answer(body=msgspec.json.encode(await show_tree(service.client, service.recent, known)))

    def branch(path: str) -> str:
        return path.replace("{id}", "{id}/{branch}")

    return [
        described("POST", FORK, fork, "Branch an answer under way", table, is_generation=True),
        described("POST", branch(FORK), fork, "Branch one of its branches", table, is_generation=True),
        described("POST", EXTEND, extend, "Put text or tokens into an answer under way", EXTEND_TABLE),
        described("POST", branch(EXTEND), extend, "The same for one of its branches", EXTEND_TABLE),
        described("POST", PRUNE, end, "End branches of an answer under way", PRUNE_TABLE),
        described("GET", TREE, show, "The live branches of an answer and what was forked from it"),
    ]
