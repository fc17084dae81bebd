"""Where a latency curve turns up.

Owns one definition, so that a sweep, a plot and a page mark the same place.
"""

import math
from collections.abc import Sequence


def find_knee(rates: Sequence[float], p99_ttft: Sequence[float | None]) -> float | None:
    """The rate after which p99 TTFT doubles: the highest measured rate below the first one whose p99 TTFT is
    more than twice that of the lowest rate.

    The reference is the lowest rate and not the neighbour, so the answer does not depend on how finely the
    rates were spaced. A rate without a p99 (nothing came back) counts as doubled; of one measured several
    times the worst counts. None where no such place was seen: the curve never doubles, or it has fewer than
    two rates, or the lowest rate has no p99 above zero.
    """
    worst: dict[float, float] = {}
    for rate, value in zip(rates, p99_ttft, strict=True):
        seconds = math.inf if value is None or math.isnan(value) else value
        worst[rate] = max(seconds, worst.get(rate, 0.0))
    ordered = sorted(worst.items())
    if not ordered or not 0.0 < ordered[0][1] < math.inf:
        return None
    bound = 2.0 * ordered[0][1]
    previous = ordered[0][0]
    for rate, seconds in ordered[1:]:
        if seconds > bound:
            return previous
        previous = rate
    return None
