"""The simulator: the real scheduler, KV cache and engine on a virtual clock.

It brings what a real run would bring from outside: time, a runner that takes as long as a cost model says,
requests of a workload, faults, a router in front of replicas, and measuring. It decides nothing about a step.
"""

from paceline.sim.faults import FaultSpec, parse_faults
from paceline.sim.router import ROUTERS
from paceline.sim.settings import Machine, SimConfig, engine_config, host_costs
from paceline.sim.simulation import simulate

__all__ = [
    "ROUTERS",
    "FaultSpec",
    "Machine",
    "SimConfig",
    "engine_config",
    "host_costs",
    "parse_faults",
    "simulate",
]
