"""A run's steps as a few hundred even bins of time, ready to draw.

Each bin holds the mean over the time that steps ran in it, so a step counts for as long as it took however
many share the bin. Gaps between steps shorter than a bin leave no notch; a bin without any step is zero.
Replicas are added up. It draws nothing.
"""

from dataclasses import dataclass

import numpy as np

from paceline.report.record import Floats, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Means per bin; `edges_s` has one entry more than the others."""

    edges_s: Floats
    rows: Floats
    waiting: Floats
    decode: Floats  # tokens per step
    prefill: Floats
    padded: Floats
    kv_used: Floats  # slots
    kv_filled: Floats
    num_replicas: int

    @property
    def middles_s(self) -> Floats:
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2.0


def make_timeline(record: RunRecord, *, replica: int | None = None, num_bins: int = 600) -> Timeline:
    """Of all replicas together, or of one."""
    assert num_bins >= 1
    wanted = range(record.num_replicas) if replica is None else (replica,)
    end_s = max(record.duration_s, float(record.step_end_s.max(initial=0.0)))
    edges_s = np.linspace(0.0, end_s if end_s > 0.0 else 1.0, num_bins + 1)
    names = ("rows", "waiting", "decode", "prefill", "padded", "kv_used", "kv_filled")
    sums = {name: np.zeros(num_bins) for name in names}
    for number in wanted:
        chosen = np.flatnonzero(record.step_replica == number)
        chosen = chosen[np.argsort(record.step_start_s[chosen], kind="stable")]
        if not chosen.size:
            continue
        start_s, end_of_s = _without_overlap(record.step_start_s[chosen], record.step_end_s[chosen])
        covered = _per_bin(np.ones(chosen.size), start_s, end_of_s, edges_s)
        for name, total in sums.items():
            values = getattr(record, f"step_{name}")[chosen].astype(np.float64)
            integral = _per_bin(values, start_s, end_of_s, edges_s)
            total += np.divide(integral, covered, out=np.zeros(num_bins), where=covered > 0.0)
    return Timeline(edges_s=edges_s, num_replicas=len(wanted), **sums)


def _without_overlap(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """Steps in order of start; one that begins before an earlier one ended begins at that end instead."""
    latest_end_s = np.maximum.accumulate(end_s)
    begins_s = start_s.copy()
    begins_s[1:] = np.maximum(start_s[1:], latest_end_s[:-1])
    return begins_s, np.maximum(end_s, begins_s)


def _per_bin(values: Floats, start_s: Floats, end_s: Floats, edges_s: Floats) -> Floats:
    """Integral over each bin of the function that is `values[i]` during step i and zero between steps."""
    until = np.cumsum(values * (end_s - start_s))
    corners_s = np.column_stack([start_s, end_s]).ravel()
    heights = np.column_stack([np.concatenate([[0.0], until[:-1]]), until]).ravel()
    integral: Floats = np.diff(np.interp(edges_s, corners_s, heights))
    # Interpolating rounds; a bin between two steps must be exactly empty.
    integral[np.abs(integral) < 1e-12 * max(float(until[-1]), 1e-300)] = 0.0
    return integral
