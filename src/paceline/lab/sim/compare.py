"""A recorded run and its repetition in the simulator, measure by measure.

Owns what is compared and how far off a measure may be. The recorded requests come again at their times, with the
lengths they had, to an engine of the recorded config; only the clock is a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.lab.report.record import RunRecord
from paceline.lab.report.summary import Distribution, Summary, summarize
from paceline.lab.sim.recorded import Recorded
from paceline.lab.sim.settings import Machine, SimConfig, host_costs
from paceline.lab.sim.simulation import simulate
from paceline.lab.workload.model import Workload

CLOSE, CLOSE_TAIL = 0.10, 0.20  # how far off a measure may be, and a p99


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One measure of both."""

    name: str
    unit: str
    seen: float | None
    simulated: float | None
    bound: float

    @property
    def error(self) -> float | None:
        """How much larger the simulated value is, as a share of the seen one; None where one of them is missing."""
        if self.seen is None or self.simulated is None or self.seen <= 0.0:
            return None
        return self.simulated / self.seen - 1.0

    @property
    def holds(self) -> bool | None:
        return None if self.error is None else abs(self.error) <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All measures of a recorded run and of its repetition."""

    seen: Summary
    simulated: Summary
    deviations: tuple[Deviation, ...]

    @property
    def holds(self) -> bool:
        return all(each.holds is not False for each in self.deviations)


def sim_config(
    recorded: Recorded, machine: Machine, *, host_step_s: float | None = None, seed: int = 0
) -> SimConfig:
    """The recorded engine on a modelled machine."""
    known = host_costs(machine.cost, host_step_s)
    return SimConfig(machine=machine, engine=recorded.config, seed=seed, **known)


def compare(record: RunRecord, workload: Workload, config: SimConfig) -> Comparison:
    """What was seen of a run beside the same requests run again on the model."""
    seen = summarize(record)
    simulated = summarize(simulate(config, workload, label="simulated"))
    return Comparison(seen=seen, simulated=simulated, deviations=deviations(seen, simulated))


def deviations(seen: Summary, simulated: Summary) -> tuple[Deviation, ...]:
    found = [
        Deviation(
            name="throughput",
            unit="tok/s",
            seen=seen.output_tokens_per_s,
            simulated=simulated.output_tokens_per_s,
            bound=CLOSE,
        )
    ]
    for name, of in _TIMES.items():
        for share in ("p50", "p90", "p99"):
            deviation = Deviation(
                name=f"{name} {share}",
                unit="ms",
                seen=_milliseconds(getattr(of(seen), share)),
                simulated=_milliseconds(getattr(of(simulated), share)),
                bound=CLOSE_TAIL if share == "p99" else CLOSE,
            )
            found.append(deviation)
    return tuple(found)


_TIMES: dict[str, Callable[[Summary], Distribution]] = {
    "TTFT": lambda summary: summary.ttft_s,
    "ITL": lambda summary: summary.itl_s,
    "end to end": lambda summary: summary.e2e_s,
}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
