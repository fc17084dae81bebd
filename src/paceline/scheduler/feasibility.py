"""Whether what a request wants of its times can be had: the rule by which it is refused at once.

A wish is impossible if the machine, empty, would need more than it by a margin; infeasible if that is so although the
request went before everybody, or if in its place in the order it would come more than twice as late as it wants. The
margins are there because a forecast is one: whoever is close is let in. Knows forecasts and wishes, nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.events import Rule
from paceline.core.request import Request
from paceline.errors import DeadlineImpossible, DeadlineInfeasible
from paceline.scheduler.forecast import Forecast
from paceline.scheduler.objections import Objection

CERTAIN = 0.8  # share of an estimate that will surely be needed
LATE = 2.0  # times a wish that the forecast may be
CHANCE = "; wish for more time, or send on_infeasible: try"


class _Wish(NamedTuple):
    """Milliseconds asked for; seconds from now: wanted, needed by nobody else being here, by going first, and by its
    place."""

    param: str
    what: str
    asked_ms: float
    wanted_s: float
    alone_s: float
    soonest_s: float
    expected_s: float


def late_objection(request: Request, forecast: Forecast) -> Objection | None:
    """Why a request cannot make its times; None: it can, or means to try."""
    if request.sampling.on_infeasible == "try":
        return None
    for wish in _wishes(request, forecast):
        wanted = f"{wish.param} is {wish.asked_ms:g}, but {wish.what}"
        if CERTAIN * wish.alone_s > wish.wanted_s:
            message = f"{wanted} would take about {1e3 * wish.alone_s:.0f} ms on this machine if it were empty{CHANCE}"
            error = DeadlineImpossible(message, param=wish.param)
            return Objection([request], Rule.DEADLINE_IMPOSSIBLE, error)
        if CERTAIN * wish.soonest_s > wish.wanted_s or wish.expected_s > LATE * wish.wanted_s:
            message = f"{wanted} would take about {1e3 * wish.expected_s:.0f} ms as things stand{CHANCE}"
            retry_after_s = max(0.0, wish.expected_s - wish.wanted_s)
            late = DeadlineInfeasible(message, param=wish.param, retry_after_s=retry_after_s)
            return Objection([request], Rule.DEADLINE_INFEASIBLE, late)
    return None


def _wishes(request: Request, forecast: Forecast) -> list[_Wish]:
    wanted, found = request.sampling, []
    if wanted.ttft_slo_ms is not None:
        times = (forecast.alone_first_s, forecast.soonest_first_s, forecast.first_token_s)
        first_s = wanted.ttft_slo_ms / 1e3 - forecast.waited_s
        found.append(_Wish("ttft_slo_ms", "the first token", wanted.ttft_slo_ms, first_s, *times))
    if wanted.itl_slo_ms is not None:
        between_s = forecast.between_s
        gap_s = wanted.itl_slo_ms / 1e3
        found.append(_Wish("itl_slo_ms", "a token", wanted.itl_slo_ms, gap_s, *(between_s,) * 3))
    if wanted.deadline_ms is not None:
        times = (forecast.alone_finish_s, forecast.soonest_finish_s, forecast.finish_s)
        finish_s = wanted.deadline_ms / 1e3 - forecast.waited_s
        what = f"an answer of {forecast.num_output:.0f} tokens"
        found.append(_Wish("deadline_ms", what, wanted.deadline_ms, finish_s, *times))
    return found
