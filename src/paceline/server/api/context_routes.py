"""/v1/contexts: texts with names, kept and computed for the conversations that use them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from paceline.core.parameters import MAX_PIN_S, Pin
from paceline.core.request import account_of
from paceline.core.sampling import SamplingParams
from paceline.errors import PinsFull
from paceline.server.api.fields import FLAG, Field, FieldTable, choice, ignored_header, text, whole
from paceline.server.api.model_routes import service_named
from paceline.server.api.openai_fields import context_reuse_field, model_field
from paceline.server.api.openai_requests import ParsedBody, check_caller, checked_model
from paceline.server.api.openai_responses import with_receipt
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call
from paceline.server.errors import ContextTooLong, UnknownContext
from paceline.server.generate.context_store import Context, new_id
from paceline.server.generate.generation import Usage
from paceline.server.generate.prompt_size import check_blend, check_length, check_prompt
from paceline.server.generate.service import INLINE_CHARS, Service

PATH, ONE = "/v1/contexts", "/v1/contexts/{id}"
DEFAULT_TTL_S = 3600
LONGEST_NAME = 128
ROLES = ("user", "system")
# What may stand behind a text in its message: what the prompts with all of these have in common is the text's own.
BEHIND = ("", "\nA", "\n1.")

TABLE = FieldTable(
    PATH,
    [
        model_field(),
        Field("name", text(0, LONGEST_NAME), "for people; need not be unique"),
        Field("text", text(1), "what stands wherever the context is named", required=True),
        Field("ttl_s", whole(1, MAX_PIN_S), f"seconds that it is kept (default {DEFAULT_TTL_S})"),
        Field("pin", FLAG, "compute it now, and keep its KV in the cache for that time (default true)"),
        context_reuse_field(
            "how it is computed; exact (default): as the beginning of a conversation; blend: alone"
        ),
        Field(
            "role",
            choice(ROLES),
            "role of the message that it begins, at the beginning of a conversation, as it is computed (default user)",
        ),
    ],
)


class ContextRoutes:
    """Those of all models: an id is enough to find one."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services

    async def create(self, call: Call) -> Answer:
        read = TABLE.read(call.body, strict=self._services[0].settings.strict_fields)
        given = read.fields
        name = given.get("model")
        service = self._services[0] if name is None else service_named(self._services, name, call.caller)
        service.check_ready(call)
        model = checked_model(given.get("model"), service.facts)
        check_caller(call.caller, model, service.facts)
        with service.contexts.room_for(call.caller.tenant, len(given["text"].encode(errors="replace"))):
            made, usage = await _make(call, service, model, given)
        service.contexts.add(made)
        shown = _shown(made) if usage is None else with_receipt(_shown(made), usage)
        return Answer(body=msgspec.json.encode(shown), headers=ignored_header(read.ignored))

    async def list_all(self, call: Call) -> Answer:
        cards = [_shown(each) for service in self._services for each in service.contexts.of(call.caller)]
        return Answer(body=msgspec.json.encode({"object": "list", "data": cards}))

    async def show(self, call: Call) -> Answer:
        _, found = self._find(call)
        return Answer(body=msgspec.json.encode({**_shown(found), "text": found.text}))

    async def delete(self, call: Call) -> Answer:
        service, found = self._find(call)
        service.contexts.delete(found)
        if found.prompt:
            service.client.unpin(account_of(found.tenant), found.id)
        return Answer(body=msgspec.json.encode({"id": found.id, "object": "context", "deleted": True}))

    def _find(self, call: Call) -> tuple[Service, Context]:
        *others, last = self._services
        for service in others:
            try:
                return service, service.contexts.find(call.path["id"], call.caller)
            except UnknownContext:
                continue
        return last, last.contexts.find(call.path["id"], call.caller)


async def _make(
    call: Call, service: Service, model: str, given: Mapping[str, Any]
) -> tuple[Context, Usage | None]:
    """A context, computed and pinned where that is wanted, that is not kept yet."""
    words, role, ttl_s = given["text"], given.get("role", "user"), given.get("ttl_s", DEFAULT_TTL_S)
    turns = [_conversation(model, role, words + behind) for behind in BEHIND]
    try:
        size = check_prompt(turns[0], service.facts.max_model_len, service.settings.limits)
    except ContextTooLong as error:  # it names the messages that are made of the text here
        error.param = "text"
        raise
    is_placed, is_pinned = given.get("context_reuse") == "blend", given.get("pin", True)
    blended = replace(turns[0], blends=is_placed)
    check_blend(blended, service.client.info.blending, service.model.names, sees=False)

    def read() -> tuple[int, list[int]]:
        alone = service.tokenizer.encode(words, add_special_tokens=False)
        if is_placed and is_pinned:
            return len(alone), alone
        wanted = turns if is_pinned else []
        return len(alone), _in_common([service.prompt_ids(turn) for turn in wanted])

    num_tokens, ids = await service.work(read, inline=size * len(BEHIND) <= INLINE_CHARS)
    check_length(num_tokens, service.facts.max_model_len, "text")
    made = Context(
        id=new_id(),
        tenant=call.caller.tenant,
        name=given.get("name", ""),
        text=words,
        model=model,
        role=role,
        num_tokens=num_tokens,
        created_s=time.time(),
        ttl_s=ttl_s,
        until_s=service.contexts.now_s() + ttl_s,
        is_placed=is_placed,
    )
    num_blocks = len(ids) // service.client.info.block_size
    if not num_blocks:  # nothing is to be pinned, or less than a block
        return made, None
    try:
        num_pinned, usage = await _compute(call, service, made, ids)
        if num_pinned < num_blocks:
            raise PinsFull(
                f"{num_blocks} KV blocks were to be pinned and there was room for {num_pinned}; delete a context, or "
                "make one without pin"
            )
    except BaseException:  # the engine may have pinned it
        service.client.unpin(account_of(made.tenant), made.id)
        raise
    return replace(made, prompt=tuple(ids), num_blocks=num_pinned), usage


def _conversation(model: str, role: str, words: str) -> ParsedBody:
    return ParsedBody(
        model=model,
        sampling=SamplingParams(),
        messages=[{"role": role, "content": words}],
        template={"add_generation_prompt": False},
    )


def _in_common(prompts: Sequence[list[int]]) -> list[int]:
    """The tokens that all of them begin with."""
    first: list[int] = next(iter(prompts), [])
    end = len(first)
    for other in prompts[1:]:
        least = min(end, len(other))
        end = next((at for at in range(least) if first[at] != other[at]), least)
    return first[:end]


async def _compute(call: Call, service: Service, made: Context, ids: list[int]) -> tuple[int, Usage]:
    """Let the engine compute and pin it: a request that ends without output. Returns how many blocks are pinned."""
    pin = Pin(ttl_s=made.ttl_s, name=made.id, num_tokens=len(ids), computes=True)
    sampling = SamplingParams(max_tokens=1, temperature=0, pin=pin)
    body = ParsedBody(model=made.model, sampling=sampling, prompts=(ids,), is_module=made.is_placed)
    generation = await service.start(call, body)
    try:
        await generation.complete()
        usage = generation.usage
        generation.release()
    finally:
        generation.close()
    return generation.record.cost.pinned, usage


def _shown(context: Context) -> dict[str, Any]:
    expires_s = context.created_s + context.ttl_s
    return {
        "id": context.id,
        "object": "context",
        "name": context.name,
        "model": context.model,
        "role": context.role,
        "context_reuse": "blend" if context.is_placed else "exact",
        "tokens": context.num_tokens,
        "pinned": bool(context.prompt),
        "blocks": context.num_blocks,
        "created_at": int(context.created_s),
        "expires_at": int(expires_s),
        "expires": datetime.fromtimestamp(expires_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def context_routes(services: Sequence[Service]) -> list[Route]:
    routes = ContextRoutes(services)
    return [
        described("POST", PATH, routes.create, "Keep a text as a context", TABLE),
        described("GET HEAD", PATH, routes.list_all, "List your contexts"),
        described("GET HEAD", ONE, routes.show, "Tell about one context"),
        described("DELETE", ONE, routes.delete, "Delete a context"),
    ]
