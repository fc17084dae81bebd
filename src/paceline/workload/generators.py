"""Built-in workloads: synthetic requests with the statistics of public traces, and simple fixed shapes.

Owns what each built-in name means and its default size. Lengths come from quantile tables tied by a Gaussian
copula, arrivals from a Poisson process with a gamma-modulated rate; the numbers are in `fitted`. Reads no
file. The first n requests do not depend on how many are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.workload import fitted
from paceline.workload.arrivals import ArrivalProcess
from paceline.workload.distributions import Floats, Stream, draw_lengths, stream
from paceline.workload.model import DEFAULT_TENANTS, Workload
from paceline.workload.sessions import draw_conversations

SHAPE_REQUESTS = 256
SHAPE_FORMS = "fixed:PROMPTxOUTPUT, uniform:LOW-HIGHxLOW-HIGH"
_MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A built-in workload: how many requests it has unless told, and how to draw them."""

    num_requests: int
    draw: Callable[[int, int], Workload]  # (num_requests, seed)


def azure_conv(num_requests: int, seed: int) -> Workload:
    """Chat requests as in the Azure 2023 conversation trace (Splitwise): 5.5 a second, rate swings slowly."""
    prompt_len, output_len = draw_lengths(
        num_requests,
        seed,
        fitted.AZURE_CONV_PROMPT,
        fitted.AZURE_CONV_OUTPUT,
        fitted.AZURE_CONV_RANK_CORRELATION,
    )
    return _single("azure-conv", fitted.AZURE_CONV_ARRIVALS.draw(num_requests, seed), prompt_len, output_len)


def azure_code(num_requests: int, seed: int) -> Workload:
    """Code completion as in the Azure 2023 code trace (Splitwise): short outputs, bursts, long silences.

    Fitted to the statistics of the published trace (8,819 requests in 57 minutes, prompts of 2,048 tokens in
    the mean and 1,469 in the median, outputs of 28 and 13, as its paper reports too).
    """
    prompt_len, output_len = draw_lengths(
        num_requests,
        seed,
        fitted.AZURE_CODE_PROMPT,
        fitted.AZURE_CODE_OUTPUT,
        fitted.AZURE_CODE_RANK_CORRELATION,
    )
    return _single("azure-code", fitted.AZURE_CODE_ARRIVALS.draw(num_requests, seed), prompt_len, output_len)


def mooncake(num_requests: int, seed: int) -> Workload:
    """Long chats in sessions as in the Mooncake conversation trace, with the ids of shared prompt blocks."""
    arrival_s = fitted.MOONCAKE_ARRIVALS.draw(num_requests, seed)
    conversations = draw_conversations(fitted.MOONCAKE_SESSIONS, arrival_s, seed)
    return Workload(
        name="mooncake",
        arrival_s=arrival_s,
        prompt_len=conversations.prompt_len,
        output_len=conversations.output_len,
        tenant=np.zeros(num_requests, dtype=np.int32),
        tenants=DEFAULT_TENANTS,
        prefix_ids=conversations.block_ids,
        prefix_block=fitted.MOONCAKE_SESSIONS.block,
    )


def multi_tenant(num_requests: int, seed: int) -> Workload:
    """Many clients of very different weight, as in the Chatbot Arena trace of the VTC artifact.

    27 clients come and go over ten minutes; the four heaviest make 58 % of the requests. Lengths have the
    whole trace's distribution and do not depend on the client. Longer workloads repeat the ten minutes.
    """
    slot_s, rates = _client_rates()
    total = rates.sum(axis=1)
    process = ArrivalProcess(
        rate=float(total.mean()),
        cycle_s=fitted.MULTI_TENANT_CYCLE_S,
        waves=fitted.MULTI_TENANT_WAVES,
        profile=tuple((total / total.mean()).tolist()),
    )
    arrival_s = process.draw(num_requests, seed)
    slots = (np.mod(arrival_s, fitted.MULTI_TENANT_CYCLE_S) // slot_s).astype(np.intp)
    shares = np.cumsum(rates / total[:, None], axis=1)
    chance = stream(seed, Stream.TENANT).random(num_requests)
    # The number of clients whose cumulative share lies below the draw is the client drawn.
    tenant = (shares[slots, :-1] <= chance[:, None]).sum(axis=1).astype(np.int32)
    prompt_len, output_len = draw_lengths(
        num_requests,
        seed,
        fitted.MULTI_TENANT_PROMPT,
        fitted.MULTI_TENANT_OUTPUT,
        fitted.MULTI_TENANT_RANK_CORRELATION,
    )
    return Workload(
        name="multi-tenant",
        arrival_s=arrival_s,
        prompt_len=prompt_len,
        output_len=output_len,
        tenant=tenant,
        tenants=tuple(str(client) for client in range(rates.shape[1])),
        prefix_ids=None,
        prefix_block=0,
    )


GENERATORS: dict[str, Generator] = {
    "azure-conv": Generator(num_requests=fitted.AZURE_CONV_REQUESTS, draw=azure_conv),
    "azure-code": Generator(num_requests=fitted.AZURE_CODE_REQUESTS, draw=azure_code),
    "mooncake": Generator(num_requests=fitted.MOONCAKE_REQUESTS, draw=mooncake),
    "multi-tenant": Generator(num_requests=fitted.MULTI_TENANT_REQUESTS, draw=multi_tenant),
}


def find_generator(source: str) -> Generator | None:
    """The built-in that `source` names; None when it names none, an InputError when it names one wrongly."""
    if source in GENERATORS:
        return GENERATORS[source]
    kind, colon, shape = source.partition(":")
    if colon and kind in ("fixed", "uniform"):
        return _shape_generator(source, kind, shape)
    return None


def _single(
    name: str, arrival_s: Floats, prompt_len: NDArray[np.int32], output_len: NDArray[np.int32]
) -> Workload:
    return Workload(
        name=name,
        arrival_s=arrival_s,
        prompt_len=prompt_len,
        output_len=output_len,
        tenant=np.zeros(len(arrival_s), dtype=np.int32),
        tenants=DEFAULT_TENANTS,
        prefix_ids=None,
        prefix_block=0,
    )


def _client_rates() -> tuple[float, Floats]:
    """Width of a slot of the cycle, and requests per second of each client (column) in each slot (row)."""
    slot_s = 5.0
    num_slots = round(fitted.MULTI_TENANT_CYCLE_S / slot_s)
    num_clients = 1 + max(client for client, _, _, _ in fitted.MULTI_TENANT_STAYS)
    rates = np.zeros((num_slots, num_clients), dtype=np.float64)
    for client, num_requests, from_s, until_s in fitted.MULTI_TENANT_STAYS:
        rates[round(from_s / slot_s) : round(until_s / slot_s), client] += num_requests / (until_s - from_s)
    return slot_s, rates


def _shape_generator(source: str, kind: str, shape: str) -> Generator:
    """`fixed:512x128` and `uniform:100-1024x100-1024`: lengths without a trace, all at once."""
    length = r"(\d{1,10})" if kind == "fixed" else r"(\d{1,10})-(\d{1,10})"
    match = re.fullmatch(f"{length}x{length}", shape, flags=re.ASCII)
    if match is None:
        raise InputError(f"cannot read the workload '{source}'; the forms are {SHAPE_FORMS}")
    numbers = [int(text) for text in match.groups()]
    prompt = (numbers[0], numbers[len(numbers) // 2 - 1])
    output = (numbers[len(numbers) // 2], numbers[-1])
    for low, high in (prompt, output):
        if not 1 <= low <= high <= _MAX_LENGTH:
            raise InputError(
                f"workload '{source}': lengths must lie between 1 and {_MAX_LENGTH}, the lower one first"
            )

    def draw(num_requests: int, seed: int) -> Workload:
        return _single(
            source,
            np.zeros(num_requests, dtype=np.float64),
            _between(prompt, num_requests, stream(seed, Stream.PROMPT)),
            _between(output, num_requests, stream(seed, Stream.OUTPUT)),
        )

    return Generator(num_requests=SHAPE_REQUESTS, draw=draw)


def _between(bounds: tuple[int, int], num_requests: int, random: np.random.Generator) -> NDArray[np.int32]:
    low, high = bounds
    return (low + np.floor(random.random(num_requests) * (high - low + 1))).astype(np.int32)
