"""From a model on disk to the routes of the API: opens the text side of the model and the service around it.

Runs beside the engine's loading, in a thread, and imports what is heavy only then. Tensors are never looked at here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.engine import ModelConfig
from paceline.config.model_set import ModelEntry
from paceline.config.server import ApiConfig
from paceline.errors import ConfigError
from paceline.process.client import EngineClient
from paceline.server.app import Api, ModelPart
from paceline.server.generate.request_record import Observer

if TYPE_CHECKING:
    from paceline.server.batches.batches import BatchSettings
    from paceline.server.billing.billing import Billing
    from paceline.server.generate.request_admission import RequestAdmission
    from paceline.server.generate.service import Service

# What takes conversations.
PICTURE_PATHS = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/estimate", "/tokenize"),
)


def model_names(model: ModelConfig, config: ApiConfig) -> tuple[str, ...]:
    """What requests may call the model; the first is what answers carry."""
    from paceline.models.files.fetch import packaged_named

    if config.model_names:
        return config.model_names
    packaged = packaged_named(model.model)
    if packaged is not None:
        return (packaged.title, packaged.name)
    assert model.model is not None
    path = Path(model.model).expanduser()
    # A path of this machine is not shown to clients; give it as a name to show it.
    is_local = path.exists() or path.is_absolute()
    name = Path(os.path.abspath(path)).name
    return tuple(dict.fromkeys((name if is_local else model.model, name, name.removesuffix(".gguf"))))


def names_of(entries: Sequence[ModelEntry], config: ApiConfig) -> list[tuple[str, ...]]:
    """What requests may call each model. Raises ConfigError where two would have one name."""
    found = [
        (entry.share.name,) if entry.share.name else model_names(entry.model, config) for entry in entries
    ]
    taken: set[str] = set()
    for names, entry in zip(found, entries, strict=True):
        asked = {*names, *entry.model.first_adapters}
        twice = taken & asked
        if twice:
            raise ConfigError(
                f"two models or adapters have the name {min(twice)!r:.100}; give them others in --models"
            )
        taken |= asked
    return found


def open_service(
    entry: ModelEntry,
    names: tuple[str, ...],
    config: ApiConfig,
    client: EngineClient,
    observer: Observer,
    billing: Billing,
    by_tenant: dict[str, int],
) -> Service:
    """The text side of one model, and the service around it and its engine."""
    from paceline.models.files.fetch import resolve
    from paceline.models.files.open import open_checkpoint
    from paceline.models.media.pictures import open_pictures
    from paceline.server.api.route import SERVER_LIMITS
    from paceline.server.generate.served_model import ServedModel, ServiceSettings
    from paceline.server.generate.service import Service
    from paceline.text.tokenizer import Tokenizer

    model = entry.model
    if model.skip_tokenizer_init:
        raise ConfigError("a server needs the tokenizer; leave --skip-tokenizer-init out")
    path = resolve(model.model, model.revision, model.download_dir)
    checkpoint = open_checkpoint(path, load_format=model.load_format)
    check_adapters(model, names)
    if model.tokenizer is None:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    else:
        tokenizer = Tokenizer.from_folder(model.tokenizer, model_vocab_size=checkpoint.spec.vocab_size)
    served = ServedModel(
        names=names,
        tokenizer=tokenizer,
        generation=checkpoint.generation,
        seed=model.seed,
        embedding=checkpoint.pooled(model.pooling),
        labels=checkpoint.spec.labels,
        pictures=open_pictures(path, model),
    )
    settings = ServiceSettings(
        limits=SERVER_LIMITS.lowered(top_logprobs=config.max_logprobs),
        strict_fields=config.strict_fields,
        max_queue=config.max_waiting_requests,
        max_queued_tokens=config.max_waiting_tokens,
        request_timeout_s=config.request_timeout_s,
        queue_timeout_s=config.queue_timeout_s,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        max_thinking_tokens=config.max_thinking_tokens,
        media_domains=config.media_domains,
        lora_dir=model.lora_dir,
    )
    return Service(client, served, settings, observer=observer, billing=billing, by_tenant=by_tenant)


def open_api(
    models: Sequence[tuple[ModelEntry, EngineClient]],
    config: ApiConfig,
    observer: Observer,
    billing: Billing,
    batch_settings: BatchSettings,
) -> Callable[[], Api]:
    """What makes the API, to be called in a thread."""
    all_names = names_of([entry for entry, _ in models], config)

    def build() -> Api:
        from paceline.server.api.batch_routes import BatchApi, batch_routes, file_routes
        from paceline.server.api.routes import routes
        from paceline.server.batches.batches import open_batches

        by_tenant: dict[str, int] = {}
        service, *further = services = [
            open_service(entry, names, config, client, observer, billing, by_tenant)
            for (entry, client), names in zip(models, all_names, strict=True)
        ]
        batches = open_batches(service, routes(service, further=further), batch_settings, further)
        of_batches = None
        if batches is not None:
            api, strict = BatchApi(batches), config.strict_fields
            for each in services:
                each.media_sources.find_file = api.content
            of_batches = [*file_routes(api), *batch_routes(api, service.settings.limits, strict=strict)]

        def close() -> None:
            for each in services:
                each.close()
            billing.close()

        return Api(
            routes=routes(service, of_batches, further),
            model_name=service.model.names[0],
            models=tuple(
                ModelPart(each.model.names[0], entry.share.share, each.client, each.recent)
                for (entry, _), each in zip(models, services, strict=True)
            ),
            is_full=lambda: all(each.admission.is_full for each in services),
            gauges=lambda: [
                *admission_gauges([each.admission for each in services]),
                *billing.gauges(),
                *context_gauges(services),
            ],
            labelled=list if batches is None else batches.figures,
            background=() if batches is None else (batches,),
            large_bodies=large_bodies(services, config),
            close=close,
        )

    return build


def large_bodies(services: Sequence[Service], config: ApiConfig) -> dict[bytes, int]:
    """Where pictures may be posted."""
    if not any(each.model.pictures is not None for each in services):
        return {}
    return dict.fromkeys(map(str.encode, PICTURE_PATHS), config.max_media_body_bytes)


def context_gauges(services: Sequence[Service]) -> list[tuple[str, str, float]]:
    """What keys keep here."""
    contexts = [service.contexts for service in services]
    return [
        ("contexts", "Contexts that are kept.", sum(map(len, contexts))),
        ("contexts_bytes", "Bytes of their texts.", sum(each.num_bytes for each in contexts)),
    ]


def check_adapters(model: ModelConfig, names: tuple[str, ...]) -> None:
    """Raises ConfigError for adapters that requests could not name, and for a folder that is not there."""
    for name in model.first_adapters:
        if name in names:
            raise ConfigError(f"--lora-modules {name}: this is the name of the model; give it another one")
    if model.lora_dir is not None and not Path(model.lora_dir).is_dir():
        raise ConfigError(f"--lora-dir {model.lora_dir}: there is no such folder; make it first")


def admission_gauges(admissions: Sequence[RequestAdmission]) -> list[tuple[str, str, float]]:
    """What is taken of the places and of the room for prompts."""
    taken = sum(each.places_taken for each in admissions)
    waiting = sum(each.tokens_waiting for each in admissions)
    return [
        ("admission_places_taken", "Answers asked for that are not over.", taken),
        ("admission_tokens_waiting", "Prompt tokens without a first token.", waiting),
    ]
