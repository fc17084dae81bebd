"""Routes of a server with several models: each model has its own, and a request goes to those of the model it names.

A request that names no model is about a request before it, by its id, or goes to the first model; routes without a body
take `?model=NAME`. What is about all models (their list, their sleep) is not here but in `model_routes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import parse_qs

from paceline.server.access.caller import Caller
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Download, Events
from paceline.server.errors import UnknownModel, UnknownRequestId
from paceline.server.generate.service import Service

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
