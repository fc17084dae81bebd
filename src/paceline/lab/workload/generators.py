"""Built-in workloads: synthetic requests with the statistics of public traces, and simple fixed shapes.

Owns what each built-in name means and its default size. Lengths come from quantile tables tied by a Gaussian
copula, arrivals from a Poisson process with a gamma-modulated rate; the numbers stand below. Reads no
file. The first n requests do not depend on how many are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.workload.arrivals import (
    ArrivalProcess,
    Floats,
    Pauses,
    QuantileTable,
    RandomStream,
    Wave,
    draw_lengths,
    stream,
)
from paceline.lab.workload.sessions import SessionModel, draw_conversations
from paceline.lab.workload.workload import Workload

# The numbers behind the built-in generators: quantiles and rates measured on public traces.
#
# Data only; the functions behind them say what each number does. Measured from the Azure LLM inference traces of 2023
# (Microsoft, CC-BY-4.0), the Mooncake conversation trace (Apache-2.0) and the multi-client Chatbot Arena trace of
# the VTC artifact (Apache-2.0). No row of any trace is here. docs/reference/workloads.md compares what the
# generators make of these numbers with the traces themselves.


_LENGTH_LEVELS = (
    0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55,
    0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999, 1.0,
)  # fmt: skip
_SHORT_LEVELS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def _lengths(*values: float) -> QuantileTable:
    return QuantileTable(levels=_LENGTH_LEVELS, values=values)


def _short(*values: float, geometric: bool = True) -> QuantileTable:
    return QuantileTable(levels=_SHORT_LEVELS, values=values, geometric=geometric)


# ---------------------------------------------------------------- Azure 2023, conversation
#
# Chat requests as in the Azure 2023 conversation trace (Splitwise): 5.5 a second, rate swings slowly.

AZURE_CONV_LENGTHS = partial(
    draw_lengths,
    prompt=_lengths(
        2, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045,
        1071, 1097, 1130, 1189, 1315, 1876, 2734, 4083, 4092, 4142, 4831, 6179, 14050,
    ),
    output=_lengths(
        7, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151,
        177, 217, 384, 395, 400, 411, 424, 451, 522, 601, 643, 954, 1000,
    ),
    rank_correlation=0.073,
)  # fmt: skip
AZURE_CONV_ARRIVALS = ArrivalProcess(
    rate=5.53,
    cycle_s=3600.0,
    waves=(
        Wave(window_s=400.0, variance=0.047),
        Wave(window_s=10.0, variance=0.006),
        Wave(window_s=1.0, variance=0.02),
    ),
)

# ---------------------------------------------------------------- Azure 2023, code
#
# Code completion as in the Azure 2023 code trace (Splitwise): short outputs, bursts, long silences. Fitted to the
# statistics of the published trace (8,819 requests in 57 minutes, prompts of 2,048 tokens in the mean and 1,469 in the
# median, outputs of 28 and 13, as its paper reports too).

AZURE_CODE_LENGTHS = partial(
    draw_lengths,
    prompt=_lengths(
        3, 17, 75, 147, 232, 386, 578, 770, 939, 1075, 1261, 1469, 1690,
        1909, 2164, 2433, 2744, 3192, 3920, 5188, 7303, 7435, 7436, 7436, 7437, 7437,
    ),
    output=_lengths(
        6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14,
        16, 18, 20, 24, 29, 39, 55, 90, 145, 251, 359, 825, 1899,
    ),
    rank_correlation=-0.021,
)  # fmt: skip
AZURE_CODE_ARRIVALS = ArrivalProcess(
    rate=9.08,
    cycle_s=960.0,
    waves=(
        Wave(window_s=20.0, variance=0.15),
        Wave(window_s=4.0, variance=0.3),
        Wave(window_s=0.5, variance=0.25),
    ),
    pauses=Pauses(
        busy_s=QuantileTable(
            levels=(0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0), values=(1.4, 5.9, 9.6, 15.5, 23.1, 26.8, 45.9)
        ),
        pause_s=QuantileTable(
            levels=(0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0), values=(5.4, 7.6, 10.3, 25.1, 49.1, 105.6, 217.2)
        ),
        per_cycle=57,
    ),
)

# ---------------------------------------------------------------- Mooncake, conversation

MOONCAKE_SESSIONS = SessionModel(
    block=512,
    first_prompt=_lengths(
        891, 894, 897, 905, 943, 1092, 1336, 1757, 2767, 3913, 4587, 5264, 6188,
        7418, 8828, 10771, 13056, 15871, 19437, 25559, 38494, 58637, 89868, 111632, 121160, 126195,
    ),
    output=_lengths(
        1, 3, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375,
        399, 423, 447, 472, 504, 543, 597, 698, 835, 1119, 1568, 2000, 2000,
    ),
    rank_correlation=0.085,  # of first prompts; later turns dilute it to the trace's 0.072
    turn_correlation=0.64,
    continues=(0.41, 0.47, 0.58, 0.65, 0.70, 0.74, 0.79),
    continues_scale=((0, 1.15), (3072, 1.0), (32768, 0.75)),
    gap_s=_short(3.0, 30.0, 45.0, 72.0, 135.0, 300.0, 534.0, 668.0, 1742.0, 3030.0),
    growth=(  # plain chat adds a question; a prompt of middle length often another retrieved page
        (0, _short(-210, -7, 5, 9, 21, 142, 756, 3617, 10248, 33577, geometric=False)),
        (3072, _short(-597, -12, 0, 10, 36, 1535, 5529, 8191, 17348, 72505, geometric=False)),
        (16384, _short(-155, -5, 6, 10, 23, 220, 2428, 6392, 19887, 91467, geometric=False)),
    ),
    repeats=0.028,
    rewriters=((2048, 0.02), (4096, 0.08), (8192, 0.42)),
    rewrites=0.78,
    rewrite_ratio=_short(0.17, 0.51, 0.61, 0.79, 0.99, 1.11, 1.38, 1.68, 2.83, 7.72),
    rewrite_kept=_short(0.015, 0.053, 0.068, 0.111, 0.214, 0.452, 0.833, 0.906, 0.957, 0.986),
)  # fmt: skip
MOONCAKE_ARRIVALS = ArrivalProcess(
    rate=3.40,
    cycle_s=3600.0,
    waves=(Wave(window_s=400.0, variance=0.008), Wave(window_s=40.0, variance=0.01)),
    tick_s=3.0,
)

# ---------------------------------------------------------------- Chatbot Arena, many clients

MULTI_TENANT_LENGTHS = partial(
    draw_lengths,
    prompt=_lengths(
        2, 2, 2, 5, 8, 10, 13, 16, 19, 24, 31, 40, 52,
        68, 92, 124, 161, 214, 299, 432, 653, 776, 902, 956, 1015, 1021,
    ),
    output=_lengths(
        2, 3, 10, 18, 29, 43, 62, 85, 109, 141, 173, 211, 255,
        308, 351, 400, 458, 511, 512, 513, 513, 627, 785, 884, 977, 977,
    ),
    rank_correlation=0.264,
)  # fmt: skip
MULTI_TENANT_CYCLE_S = 600.0
# One stay of a client: its number, requests in a cycle, and from when to when of a cycle it is there.
MULTI_TENANT_STAYS = (
    (0, 153, 0, 240), (0, 46, 240, 600), (1, 40, 0, 600), (2, 296, 0, 600), (3, 22, 450, 600),
    (4, 66, 285, 600), (5, 120, 0, 600), (6, 67, 0, 600), (7, 56, 0, 600), (8, 36, 0, 600),
    (9, 23, 0, 600), (10, 262, 205, 600), (11, 26, 0, 600), (12, 43, 105, 600), (13, 44, 0, 600),
    (14, 22, 40, 270), (15, 46, 215, 600), (16, 25, 205, 600), (17, 3, 15, 30), (18, 12, 0, 150),
    (19, 19, 10, 150), (20, 31, 410, 600), (21, 2, 25, 65), (22, 19, 405, 575), (23, 11, 10, 85),
    (24, 2, 585, 600), (25, 7, 15, 120), (26, 1, 585, 600),
)  # fmt: skip
MULTI_TENANT_WAVES = (Wave(window_s=20.0, variance=0.036), Wave(window_s=1.0, variance=0.1))


SHAPE_REQUESTS = 256
SHAPE_FORMS = "fixed:PROMPTxOUTPUT, uniform:LOW-HIGHxLOW-HIGH"
_MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A built-in workload: its default number of requests, and how to draw them."""

    num_requests: int
    draw: Callable[[int, int], Workload]  # (num_requests, seed)


def _independent(
    name: str,
    lengths: Callable[[int, int], tuple[NDArray[np.int32], NDArray[np.int32]]],
    arrivals: ArrivalProcess,
) -> Callable[[int, int], Workload]:
    """Requests of one tenant whose lengths and arrivals do not depend on each other."""

    def draw(num_requests: int, seed: int) -> Workload:
        arrival_s = arrivals.draw(num_requests, seed)
        return Workload.of_one_tenant(name, arrival_s, *lengths(num_requests, seed))

    return draw


def mooncake(num_requests: int, seed: int) -> Workload:
    """Long chats in sessions as in the Mooncake conversation trace, with the ids of shared prompt blocks."""
    arrival_s = MOONCAKE_ARRIVALS.draw(num_requests, seed)
    return draw_conversations("mooncake", MOONCAKE_SESSIONS, arrival_s, seed)


def multi_tenant(num_requests: int, seed: int) -> Workload:
    """Many clients of very different weight, as in the Chatbot Arena trace of the VTC artifact.

    27 clients come and go over ten minutes; the four heaviest make 58 % of the requests. Lengths have the
    whole trace's distribution and do not depend on the client. Longer workloads repeat the ten minutes.
    """
    slot_s, rates = _client_rates()
    total = rates.sum(axis=1)
    process = ArrivalProcess(
        rate=float(total.mean()),
        cycle_s=MULTI_TENANT_CYCLE_S,
        waves=MULTI_TENANT_WAVES,
        profile=tuple((total / total.mean()).tolist()),
    )
    arrival_s = process.draw(num_requests, seed)
    slots = (np.mod(arrival_s, MULTI_TENANT_CYCLE_S) // slot_s).astype(np.intp)
    shares = np.cumsum(rates / total[:, None], axis=1)
    chance = stream(seed, RandomStream.TENANT).random(num_requests)
    # The number of clients whose cumulative share lies below the draw is the client drawn.
    tenant = (shares[slots, :-1] <= chance[:, None]).sum(axis=1).astype(np.int32)
    prompt_len, output_len = MULTI_TENANT_LENGTHS(num_requests, seed)
    return Workload(
        name="multi-tenant",
        arrival_s=arrival_s,
        prompt_len=prompt_len,
        output_len=output_len,
        tenant=tenant,
        tenants=tuple(str(client) for client in range(rates.shape[1])),
    )


GENERATORS: dict[str, Generator] = {
    "azure-conv": Generator(
        num_requests=19_366, draw=_independent("azure-conv", AZURE_CONV_LENGTHS, AZURE_CONV_ARRIVALS)
    ),
    "azure-code": Generator(
        num_requests=8_819, draw=_independent("azure-code", AZURE_CODE_LENGTHS, AZURE_CODE_ARRIVALS)
    ),
    "mooncake": Generator(num_requests=12_031, draw=mooncake),
    "multi-tenant": Generator(num_requests=1_500, draw=multi_tenant),
}


def find_generator(source: str) -> Generator | None:
    """The built-in that `source` names; None when it names none, an InputError when it names one wrongly."""
    if source in GENERATORS:
        return GENERATORS[source]
    kind, colon, shape = source.partition(":")
    if colon and kind in ("fixed", "uniform"):
        return _shape_generator(source, kind, shape)
    return None


def _client_rates() -> tuple[float, Floats]:
    """Width of a slot of the cycle, and requests per second of each client (column) in each slot (row)."""
    slot_s = 5.0
    num_slots = round(MULTI_TENANT_CYCLE_S / slot_s)
    num_clients = 1 + max(client for client, _, _, _ in MULTI_TENANT_STAYS)
    rates = np.zeros((num_slots, num_clients), dtype=np.float64)
    for client, num_requests, from_s, until_s in MULTI_TENANT_STAYS:
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
        return Workload.of_one_tenant(
            source,
            np.zeros(num_requests, dtype=np.float64),
            _between(prompt, num_requests, stream(seed, RandomStream.PROMPT)),
            _between(output, num_requests, stream(seed, RandomStream.OUTPUT)),
        )

    return Generator(num_requests=SHAPE_REQUESTS, draw=draw)


def _between(bounds: tuple[int, int], num_requests: int, random: np.random.Generator) -> NDArray[np.int32]:
    low, high = bounds
    return (low + np.floor(random.random(num_requests) * (high - low + 1))).astype(np.int32)
