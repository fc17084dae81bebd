"""The simulator in a program: machines, workloads, runs, their figures and plots, and replays of recorded runs.

from paceline.simulation import Machine, SimConfig, device_spec, engine_config, load_workload, model_shape, simulate

machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
load = load_workload("azure-conv", num_requests=200, rate=12.0)
record = simulate(SimConfig(machine=machine, engine=engine_config(machine, load, {})), load)
"""

from paceline.audit.runlog import read_run_log
from paceline.audit.story import explain_from_log
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.report.plots import Curve, curve_point, plot_throughput_latency, plot_timeline
from paceline.lab.report.summary import summarize
from paceline.lab.sim import FaultSpec, Machine, SimConfig, engine_config, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload import Workload, describe, load_workload

__all__ = [
    "Curve",
    "FaultSpec",
    "Machine",
    "SimConfig",
    "Workload",
    "curve_point",
    "describe",
    "device_spec",
    "engine_config",
    "explain_from_log",
    "load_workload",
    "model_shape",
    "plot_throughput_latency",
    "plot_timeline",
    "read_run_log",
    "replay",
    "simulate",
    "summarize",
]
