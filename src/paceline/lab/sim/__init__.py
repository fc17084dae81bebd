"""The simulator: the real scheduler, KV cache and engine on a virtual clock.

It brings what a real run would bring from outside: time, a runner that takes as long as a cost model says,
requests of a workload, faults, a front before replicas, and measuring. It decides nothing about a step.
"""

from paceline.lab.sim.faults import FaultSpec, parse_faults
from paceline.lab.sim.run import simulate
from paceline.lab.sim.settings import Machine, SimConfig, engine_config, host_costs

__all__ = [
    "FaultSpec",
    "Machine",
    "SimConfig",
    "engine_config",
    "host_costs",
    "parse_faults",
    "simulate",
]
