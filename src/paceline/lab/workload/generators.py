"""Built-in workloads: synthetic requests with the statistics of public traces, and simple fixed shapes.

Owns what each built-in name means and its default size. Lengths come from quantile tables tied by a Gaussian
copula, arrivals from a Poisson process with a gamma-modulated rate; the numbers stand below. Reads no
file. The first n requests do not depend on how many are asked for.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.workload.arrivals import (
    NORMAL,
    ArrivalProcess,
    Floats,
    Pauses,
    QuantileTable,
    RandomStream,
    Wave,
    draw_lengths,
    normal_correlation,
    normal_levels,
    stream,
    whole,
)
from paceline.lab.workload.workload import Images, Workload

# Conversations: a workload whose requests share blocks of their prompts.
#
# Owns the model of sessions behind the `mooncake` generator. Every prompt opens with one common system block. A
# session is a first prompt and turns that follow it; a turn brings back the earlier prompt and the answer to it and
# adds to them, asks the same again, or replaces most of a retrieved context. Block ids are handed out in order of
# first use. Knows nothing of files, and of time only the arrivals it is given.


SYSTEM_BLOCK = 0
Steps = tuple[tuple[int, float], ...]  # (from this length on, value), ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionModel:
    block: int  # tokens per block id
    first_prompt: QuantileTable
    output: QuantileTable
    rank_correlation: float  # of a prompt's and its output's length
    turn_correlation: float  # of the output lengths (their ranks) of two turns in a row
    # Chance that a turn follows the first, second, ... turn; the last one repeats.
    continues: tuple[float, ...]
    continues_scale: Steps  # that chance is scaled by this, by the length of the prompt
    gap_s: QuantileTable  # between the arrivals of two turns
    growth: tuple[tuple[int, QuantileTable], ...]  # (from this prompt on, tokens added to it and its answer)
    repeats: float  # chance that a turn asks the same prompt again
    rewriters: Steps  # share of sessions that rewrite, by the length of the first prompt
    rewrites: float  # chance that a turn of such a session replaces its context
    rewrite_ratio: QuantileTable  # a rewritten prompt's length over the one before it
    rewrite_kept: QuantileTable  # share of the blocks before that a rewritten prompt keeps


def draw_conversations(name: str, model: SessionModel, arrival_s: Floats, seed: int) -> Workload:
    """Give every arrival to the session whose next turn has waited longest, or else to a new session."""
    writer = _TextWriter(model, len(arrival_s), seed)
    waiting: list[tuple[float, int, _Turn]] = []  # due, request, its turn
    turns: list[_Turn] = []
    for request, now_s in enumerate(arrival_s.tolist()):
        if waiting and waiting[0][0] <= now_s:
            turn = writer.follow(request, heapq.heappop(waiting)[2])
        else:
            turn = writer.open(request)
        turns.append(turn)
        gap_s = writer.gap_before_next(request, turn)
        if gap_s is not None:
            heapq.heappush(waiting, (now_s + gap_s, request, turn))
    prompt_len = np.array([turn.prompt_len for turn in turns], dtype=np.int32)
    output_len = np.array([turn.output_len for turn in turns], dtype=np.int32)
    return replace(
        Workload.of_one_tenant(name, arrival_s, prompt_len, output_len),
        prefix_ids=tuple(turn.block_ids for turn in turns),
        prefix_block=model.block,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    number: int  # 0 for the first of a session
    prompt_len: int
    output_len: int
    output_normal: float  # the normal behind output_len, which the next turn's leans on
    block_ids: tuple[int, ...]
    rewriter: bool  # whether its session replaces a retrieved context


class _TextWriter:
    """Makes turns. Request i reads row i of numbers drawn beforehand, so that a prefix stays a prefix."""

    def __init__(self, model: SessionModel, num_requests: int, seed: int) -> None:
        self._model = model
        self._next_id = SYSTEM_BLOCK + 1
        prompt_normals = stream(seed, RandomStream.PROMPT).standard_normal(num_requests)
        self._prompt_normals = prompt_normals.tolist()
        self._first_prompts = model.first_prompt.at(normal_levels(prompt_normals)).tolist()
        self._own_normals = stream(seed, RandomStream.OUTPUT).standard_normal(num_requests).tolist()
        self._chances = stream(seed, RandomStream.SESSION).random((num_requests, 5)).tolist()

    def open(self, request: int) -> _Turn:
        prompt_len = round(self._first_prompts[request])
        rewriter = self._chances[request][0] < _step(self._model.rewriters, prompt_len)
        tie = normal_correlation(self._model.rank_correlation)
        return self._turn(
            number=0,
            prompt_len=prompt_len,
            output_normal=self._lean(request, self._prompt_normals[request], tie),
            kept=(SYSTEM_BLOCK,),
            rewriter=rewriter,
        )

    def follow(self, request: int, before: _Turn) -> _Turn:
        prompt_len, kept = self._next_prompt(request, before)
        tie = normal_correlation(self._model.turn_correlation)
        return self._turn(
            number=before.number + 1,
            prompt_len=prompt_len,
            output_normal=self._lean(request, before.output_normal, tie),
            kept=kept,
            rewriter=before.rewriter,
        )

    def gap_before_next(self, request: int, turn: _Turn) -> float | None:
        """Seconds until the session's next turn; None when this is its last."""
        model = self._model
        # A turn that follows a prompt this short shares only the system block, so no trace can tell it from
        # a new session; the table of first prompts counts it as one.
        if turn.prompt_len < 2 * model.block:
            return None
        chance = model.continues[min(turn.number, len(model.continues) - 1)]
        chance *= _step(model.continues_scale, turn.prompt_len)
        _, _, _, continues, gap = self._chances[request]
        return model.gap_s.at_one(gap) if continues < chance else None

    def _next_prompt(self, request: int, before: _Turn) -> tuple[int, tuple[int, ...]]:
        """Length of the next prompt and the block ids it keeps."""
        model = self._model
        kind, amount, kept_level, _, _ = self._chances[request]
        if kind < model.repeats:
            return before.prompt_len, before.block_ids
        longest = int(model.first_prompt.values[-1])
        if before.rewriter and kind < model.repeats + model.rewrites:
            scaled = round(before.prompt_len * model.rewrite_ratio.at_one(amount))
            prompt_len = min(max(scaled, 2 * model.block + 1), longest)
            share = model.rewrite_kept.at_one(kept_level)
            most = min(before.prompt_len, prompt_len) // model.block  # a partial block is never shared
            num_kept = max(1, min(round(share * len(before.block_ids)), most))
            return prompt_len, before.block_ids[:num_kept]
        growth = next(table for start, table in reversed(model.growth) if before.prompt_len >= start)
        longer = before.prompt_len + before.output_len + round(growth.at_one(amount))
        # The partial last block of the earlier prompt is filled up by what follows and gets another id.
        full = before.block_ids[: before.prompt_len // model.block]
        return min(max(longer, before.prompt_len + 1), longest), full

    def _turn(
        self, *, number: int, prompt_len: int, output_normal: float, kept: tuple[int, ...], rewriter: bool
    ) -> _Turn:
        num_new = math.ceil(prompt_len / self._model.block) - len(kept)
        fresh = tuple(range(self._next_id, self._next_id + num_new))
        self._next_id += max(num_new, 0)
        output_len = max(1, round(self._model.output.at_one(NORMAL.cdf(output_normal))))
        return _Turn(
            number=number,
            prompt_len=prompt_len,
            output_len=output_len,
            output_normal=output_normal,
            block_ids=kept + fresh,
            rewriter=rewriter,
        )

    def _lean(self, request: int, other: float, tie: float) -> float:
        """A normal of this request that has correlation `tie` with `other`."""
        own: float = self._own_normals[request]
        return tie * other + math.sqrt(1.0 - tie * tie) * own


def _step(steps: Steps, length: int) -> float:
    """The value of the last step that starts at or below `length`; 0 before the first."""
    return next((value for start, value in reversed(steps) if length >= start), 0.0)


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


# ---------------------------------------------------------------- ServeGen, pictures
#
# Requests with pictures as in the mm-image service of ServeGen (Apache-2.0), 35 clients of a Qwen-VL over a day: one
# hour at the day's mean rate. Texts with a template of one client are short, those of others long, and with them the
# outputs; the texts before small pictures are long.


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """Requests with pictures. The normals behind its tables lean on each other, so that the tables hold exactly."""

    text: QuantileTable
    output: QuantileTable
    count: QuantileTable  # pictures of a request, rounded
    tokens: QuantileTable  # of a picture
    text_by_count: float  # correlation of the normal of texts with that of counts
    output_by_text: float
    tokens_by_text: float  # with what texts have beside counts: more small pictures do not come of it


MM_IMAGE = ImageModel(
    text=_lengths(
        30, 36, 41, 41, 63, 75, 76, 79, 82, 90, 94, 106, 127,
        186, 372, 474, 1029, 1221, 1509, 1911, 2344, 2712, 3068, 3207, 3398, 4242,
    ),
    output=_lengths(
        2, 2, 3, 6, 8, 19, 29, 41, 57, 73, 86, 100, 118,
        135, 152, 167, 185, 204, 228, 264, 337, 423, 586, 799, 2000, 2000,
    ),
    count=QuantileTable(
        levels=(
            0.0, 0.0057, 0.0058, 0.8045, 0.8046, 0.8706, 0.8707, 0.9463, 0.967, 0.977, 0.9834,
            0.9894, 0.9914, 0.9922, 0.9961, 0.999, 1.0,
        ),
        values=(
            0.1, 0.1, 1.0, 1.0, 2.0, 2.0, 3.0, 3.49, 4.49, 5.49, 6.49, 8.49, 9.49, 10.49, 20.49, 41.0, 49.0,
        ),
    ),
    tokens=_lengths(
        4, 4, 6, 6, 6, 27, 114, 180, 240, 252, 299, 406, 460,
        576, 805, 972, 1156, 1196, 1196, 1224, 1242, 1254, 1269, 1272, 1276, 1280,
    ),
    text_by_count=0.6,
    output_by_text=0.66,
    tokens_by_text=-0.45,
)  # fmt: skip
MM_IMAGE_ARRIVALS = ArrivalProcess(
    rate=9.47,
    cycle_s=3600.0,
    waves=(
        Wave(window_s=60.0, variance=0.0013),
        Wave(window_s=10.0, variance=0.0168),
        Wave(window_s=1.0, variance=0.085),
        Wave(window_s=0.1, variance=1.67),
    ),
)


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


def mm_image(num_requests: int, seed: int) -> Workload:
    """Requests with pictures as in ServeGen's mm-image service. No two pictures are the same."""
    model = MM_IMAGE

    def lean(on: Floats, tie: float, own: RandomStream) -> Floats:
        return tie * on + math.sqrt(1.0 - tie * tie) * stream(seed, own).standard_normal(len(on))

    by_count = stream(seed, RandomStream.IMAGES).standard_normal(num_requests)
    beside = stream(seed, RandomStream.PROMPT).standard_normal(num_requests)
    by_text = model.text_by_count * by_count + math.sqrt(1.0 - model.text_by_count**2) * beside
    counts = np.rint(model.count.at(normal_levels(by_count))).astype(np.int64)
    by_picture = lean(np.repeat(beside, counts), model.tokens_by_text, RandomStream.IMAGE_TOKENS)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    images = Images(
        first=first,
        tokens=whole(model.tokens.at(normal_levels(by_picture))),
        content=np.arange(len(by_picture)),
    )
    texts = whole(model.text.at(normal_levels(by_text)))
    by_output = lean(by_text, model.output_by_text, RandomStream.OUTPUT)
    arrival_s = MM_IMAGE_ARRIVALS.draw(num_requests, seed)
    outputs = whole(model.output.at(normal_levels(by_output)))
    prompts = (texts + images.sums()).astype(np.int32)
    return replace(Workload.of_one_tenant("mm-image", arrival_s, prompts, outputs), images=images)


GENERATORS: dict[str, Generator] = {
    "azure-conv": Generator(
        num_requests=19_366, draw=_independent("azure-conv", AZURE_CONV_LENGTHS, AZURE_CONV_ARRIVALS)
    ),
    "azure-code": Generator(
        num_requests=8_819, draw=_independent("azure-code", AZURE_CODE_LENGTHS, AZURE_CODE_ARRIVALS)
    ),
    "mooncake": Generator(num_requests=12_031, draw=mooncake),
    "multi-tenant": Generator(num_requests=1_500, draw=multi_tenant),
    "mm-image": Generator(num_requests=34_000, draw=mm_image),
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
