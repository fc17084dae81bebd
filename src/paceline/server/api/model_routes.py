"""GET /v1/models and /v1/models/{id}, /tokenize, /detokenize and /tokenizer_info: the models and their tokenizers;
and how a request comes to the routes of the model it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from paceline.core.blend_quality import Blending
from paceline.core.sampling import SamplingParams
from paceline.core.standing import Standing
from paceline.errors import InvalidAdapter, InvalidRequest
from paceline.models.files.adapter_files import folder_below
from paceline.models.files.sampling_defaults import described_sampling
from paceline.process.client import EngineUnavailable
from paceline.server.access.caller import Caller
from paceline.server.api.fields import (
    FLAG,
    Field,
    FieldTable,
    choice_of,
    ignored_header,
    list_of,
    map_of,
    read_query,
    text,
    whole,
)
from paceline.server.api.openai_fields import LARGEST, messages_kind, model_field, template_fields
from paceline.server.api.openai_requests import ParsedBody, check_caller, checked_model, template_options
from paceline.server.api.route import RequestLimits, Route, described
from paceline.server.call import Answer, Call, Download, Events
from paceline.server.errors import UnknownModel, UnknownRequestId, UnsupportedRoute
from paceline.server.generate.served_model import ServedModel
from paceline.server.generate.service import INLINE_CHARS, Service


def model_routes(services: Sequence[Service]) -> list[Route]:
    async def list_all(call: Call) -> Answer:
        cards = [
            _card(name, service)
            for service in services
            for name in (*service.model.names, *service.client.adapters)
            if name in service.model.names or call.caller.may_name(name)
        ]
        page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}  # Anthropic's
        return Answer(body=msgspec.json.encode({"object": "list", "data": cards, **page}))

    async def show(call: Call) -> Answer:
        service = service_named(services, call.path["id"], call.caller)
        name = checked_model(call.path["id"], service.facts)
        check_caller(call.caller, name, service.facts)
        return Answer(body=msgspec.json.encode(_card(name, service)))

    return [
        described("GET HEAD", "/v1/models", list_all, "List the models"),
        described("GET HEAD", "/v1/models/{id:path}", show, "Tell about one model"),
    ]


def _card(name: str, service: Service) -> dict[str, Any]:
    model, adapter = service.model, service.client.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "paceline",
        "root": model.names[0] if adapter is None else name,
        "parent": None if adapter is None else model.names[0],
        "max_model_len": service.facts.max_model_len,
        "permission": [],
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "paceline": {
            "standing": service.client.stats.standing,
            "default_sampling": described_sampling(model.generation),
            **_vectors(model),
            "blending": _blending(service.client.info.blending),
            **({} if adapter is None else {"adapter": {"identity": adapter.identity, "rank": adapter.rank}}),
        },
    }


def _blending(known: Blending) -> dict[str, Any]:
    """Whether contexts may be placed, and what that keeps of the model's answers."""
    refusal = known.refusal
    shown: dict[str, Any] = {"offered": not refusal}
    if known.kept is not None:
        shown |= {"kept": round(known.kept, 4), "agreement": round(known.agreement, 4)}
    return shown | ({"reason": refusal} if refusal else {})


def _vectors(model: ServedModel) -> dict[str, Any]:
    """What texts become beside or instead of text."""
    found = model.embedding
    shown: dict[str, Any] = {"labels": list(model.labels)} if model.labels else {}
    if found is not None and found.width:
        shown["vectors"] = {"kind": found.kind, "dimensions": found.width, "normalize": found.normalize}
    return shown


# POST /v1/models/{id}/sleep and /wake; on a server of one model also vLLM's /sleep, /wake_up and /is_sleeping.


SLEEP, WAKE = "/v1/models/{id:path}/sleep", "/v1/models/{id:path}/wake"
ABORT, WAIT = "abort", "wait"
LOOK_S = 0.02


def sleep_routes(services: Sequence[Service]) -> list[Route]:
    def service_of(call: Call) -> Service:
        return service_named(services, call.path["id"], call.caller) if "id" in call.path else services[0]

    async def sleep(call: Call) -> Answer:
        service = service_of(call)
        query = read_query(call.query, ("level", "mode"))
        level = int(choice_of(query, "level", ("1", "2")) or 1)
        mode = choice_of(query, "mode", (ABORT, WAIT))
        await service.client.rest(level, aborts=mode == ABORT)
        return _standing(service)

    async def wake(call: Call) -> Answer:
        service = service_of(call)
        standing = await service.client.rest(0)
        # One that sleeps still waits for room.
        while standing in (Standing.WAKING, Standing.ASLEEP):
            await asyncio.sleep(LOOK_S)
            standing = service.client.stats.standing
        if standing is not Standing.AWAKE:
            raise EngineUnavailable("the model could not be woken", code="model_unavailable")
        return _standing(service)

    async def is_sleeping(call: Call) -> Answer:
        standing = services[0].client.stats.standing
        return Answer(body=msgspec.json.encode({"is_sleeping": standing is not Standing.AWAKE}))

    put, woken = "Put a model to sleep: ?level=1 or 2, ?mode=abort ends its requests", "Wake a model"
    found = [
        described("POST", SLEEP, sleep, put, needs_admin=True),
        described("POST", WAKE, wake, woken, needs_admin=True),
    ]
    if len(services) > 1:
        return found
    return [
        *found,
        described("POST", "/sleep", sleep, "The same as /v1/models/{id}/sleep, as vLLM", needs_admin=True),
        described("POST", "/wake_up", wake, "The same as /v1/models/{id}/wake, as vLLM", needs_admin=True),
        described("GET", "/is_sleeping", is_sleeping, "Whether the model sleeps, as vLLM"),
    ]


def _standing(service: Service) -> Answer:
    stats = service.client.stats
    values = {"id": service.model.names[0], "object": "model", "standing": stats.standing}
    return Answer(body=msgspec.json.encode(values))


# POST /v1/load_lora_adapter and /v1/unload_lora_adapter, under vLLM's names: adapters come and go while serving.


LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LONGEST_NAME, LONGEST_PATH = 128, 1024
_NAME = Field(
    "lora_name", text(1, LONGEST_NAME), "The name that requests give as their model.", required=True
)
LOAD_FIELDS = FieldTable(
    LOAD_ADAPTER,
    (
        _NAME,
        Field("lora_path", text(1, LONGEST_PATH), "A PEFT LoRA folder below --lora-dir.", required=True),
        Field("load_inplace", FLAG, "true: take the place of the adapter that has this name."),
    ),
)
UNLOAD_FIELDS = FieldTable(
    UNLOAD_ADAPTER, (_NAME, Field("lora_int_id", whole(0, LARGEST), "Not needed: the name is enough."))
)


def adapter_routes(services: Sequence[Service]) -> list[Route]:
    """An adapter is loaded for the first model, or for that of `?model=NAME`; its name is enough to unload it."""

    def folder_of_adapters(service: Service) -> Path:
        if service.settings.lora_dir is None:
            raise UnsupportedRoute("this server loads no adapters; start it with --lora-dir FOLDER")
        return Path(service.settings.lora_dir)

    async def load(call: Call) -> Answer:
        model = read_query(call.query, ("model",)).get("model")
        service = services[0] if model is None else service_named(services, model, call.caller)
        root = folder_of_adapters(service)
        given = LOAD_FIELDS.read(call.body, strict=True).fields
        name, path = given["lora_name"], given["lora_path"]
        others = [each for each in services if each is not service]
        if not name.strip() or name in service.model.names or any(serves(each, name) for each in others):
            raise InvalidAdapter(f"an adapter cannot have the name {name!r:.128}", param="lora_name")
        if name in service.client.adapters and not given.get("load_inplace"):
            raise InvalidAdapter(
                f"the adapter {name!r:.128} is loaded; load_inplace replaces it", param="lora_name"
            )
        folder = await service.work(lambda: folder_below(root, path), inline=False)
        await service.client.load_adapter(name, str(folder))
        return Answer(body=msgspec.json.encode(_card(name, service)))

    async def unload(call: Call) -> Answer:
        name = UNLOAD_FIELDS.read(call.body, strict=True).fields["lora_name"]
        having = (each for each in services if name in each.client.adapters)
        service = next(having, services[0])
        folder_of_adapters(service)
        service.client.unload_adapter(name)
        return Answer(body=msgspec.json.encode({"id": name, "object": "model", "deleted": True}))

    return [
        described("POST", LOAD_ADAPTER, load, "Load an adapter as a model", LOAD_FIELDS, needs_admin=True),
        described("POST", UNLOAD_ADAPTER, unload, "Unload an adapter", UNLOAD_FIELDS, needs_admin=True),
    ]


# POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer for clients that count tokens.


MAX_IDS = 262_144  # in one request to /detokenize


def tokenize_table(limits: RequestLimits) -> FieldTable:
    return FieldTable(
        "/tokenize",
        [
            model_field(),
            Field("prompt", text(), "a text; or give messages"),
            Field("messages", messages_kind(limits)),
            Field("add_special_tokens", FLAG, "tokens around a prompt (default)"),
            Field("return_token_strs", FLAG, "give the tokens' spelling too"),
            *template_fields(),
            Field("chat_template_kwargs", map_of(FLAG, limits.switches)),
        ],
    )


class TokenRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self.tokenize_table = tokenize_table(service.settings.limits)
        ids = list_of(whole(0, LARGEST), MAX_IDS)
        self.detokenize_table = FieldTable(
            "/detokenize", [model_field(), Field("tokens", ids, "token ids", required=True)]
        )

    async def tokenize(self, call: Call) -> Answer | Events:
        service = self._service
        read = self.tokenize_table.read(call.body, strict=service.settings.strict_fields)
        body = self._body(read.fields)
        check_caller(call.caller, body.model, service.facts)
        most = service.facts.max_model_len
        # An empty text has tokens too: none, or those around it.
        size = service.check_prompt(body) if read.fields.get("prompt") != "" else 0
        special = read.fields.get("add_special_tokens", True)

        def encode(seen: ParsedBody) -> bytes:
            if seen.messages is not None:
                ids = service.prompt_ids(seen)
            else:
                ids = service.tokenizer.encode(str(seen.prompts[0]), add_special_tokens=special)
            names = None
            if read.fields.get("return_token_strs"):
                names = [service.tokenizer.token_name(index) for index in ids]
            found = {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": names}
            return msgspec.json.encode(found)

        async with service.with_pictures(call, body) as seen:
            data = await service.work(lambda: encode(seen), inline=service.is_short(seen, size))
        return Answer(body=data, headers=ignored_header(read.ignored))

    async def detokenize(self, call: Call) -> Answer | Events:
        service = self._service
        read = self.detokenize_table.read(call.body, strict=service.settings.strict_fields)
        check_caller(call.caller, checked_model(read.fields.get("model"), service.facts), service.facts)
        ids = read.fields["tokens"]
        service.tokenizer.check_ids(ids, param="tokens")
        text = await service.work(
            lambda: service.tokenizer.decode(ids, skip_special_tokens=False), inline=len(ids) <= INLINE_CHARS
        )
        return Answer(body=msgspec.json.encode({"prompt": text}), headers=ignored_header(read.ignored))

    async def info(self, call: Call) -> Answer | Events:
        """What evaluation tools ask for before they tokenise at a distance."""
        tokenizer = self._service.tokenizer
        described: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": self._service.facts.max_model_len,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "chat_template": tokenizer.chat_template,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
        }
        for name, value in tokenizer.template_tokens.items():
            described[name] = value
        if described["eos_token"] is None and tokenizer.eos_token_ids:
            described["eos_token"] = tokenizer.token_name(tokenizer.eos_token_ids[0])
        return Answer(body=msgspec.json.encode(described))

    def _body(self, given: Mapping[str, Any]) -> ParsedBody:
        """What is to be tokenised, in the form generating routes have it."""
        if ("prompt" in given) == ("messages" in given):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        model = checked_model(given.get("model"), self._service.facts)
        if "prompt" in given:
            return ParsedBody(model=model, sampling=SamplingParams(), prompts=(given["prompt"],))
        messages = given["messages"]
        if not 1 <= len(messages) <= self._service.settings.limits.messages:
            most = self._service.settings.limits.messages
            raise InvalidRequest(f"messages must have 1 to {most} entries", param="messages")
        template = template_options(given)
        return ParsedBody(model=model, sampling=SamplingParams(), messages=messages, template=template)


def token_routes(service: Service) -> list[Route]:
    routes = TokenRoutes(service)
    tokens, text = "Tokens of a text or a conversation", "Text of tokens"
    return [
        described("POST", "/tokenize", routes.tokenize, tokens, routes.tokenize_table),
        described("POST", "/detokenize", routes.detokenize, text, routes.detokenize_table),
        described("GET HEAD", "/tokenizer_info", routes.info, "The model's tokenizer"),
    ]


# Routes of a server with several models: each model has its own, and a request goes to those of the model it names.
#
# A request that names no model is about a request before it, by its id, or goes to the first model; routes without a
# body take `?model=NAME`. What is about all models (their list, their sleep) is not here but in `model_routes`.


REQUESTS = ("/v1/requests/", "/v1/admin/requests/")


def serves(service: Service, name: object) -> bool:
    return name in service.model.names or name in service.client.adapters


def service_named(services: Sequence[Service], name: object, caller: Caller) -> Service:
    """Raises UnknownModel, also for an adapter that the caller may not name: it hears of none."""
    for service in services:
        if name in service.model.names or (serves(service, name) and caller.may_name(str(name))):
            return service
    known = ", ".join(known for service in services for known in service.model.names)
    raise UnknownModel(f"the model {name!r:.128} is not loaded; there is {known}", param="model")


def service_of(services: Sequence[Service], call: Call) -> int:
    """The place of the service that answers a call."""
    name = call.body.get("model")
    if not isinstance(name, str):  # what is no name at all, its route refuses
        (name,) = parse_qs(call.query).get("model", [None])[:1]
    if name is not None:
        return services.index(service_named(services, name, call.caller))
    if call.route.startswith(REQUESTS):
        for place, service in enumerate(services):
            try:
                service.recent.find(call.path["id"], call.caller)
            except UnknownRequestId:
                continue
            return place
    return 0


def routes_by_model(
    services: Sequence[Service], routes_of: Callable[[Service], Sequence[Route]]
) -> list[Route]:
    """The routes of all models as one list."""
    if len(services) == 1:
        return list(routes_of(services[0]))
    return [_joined(services, same) for same in zip(*map(routes_of, services), strict=True)]


def _joined(services: Sequence[Service], same: Sequence[Route]) -> Route:
    async def handler(call: Call) -> Answer | Events | Download:
        return await same[service_of(services, call)].handler(call)

    return replace(same[0], handler=handler)
