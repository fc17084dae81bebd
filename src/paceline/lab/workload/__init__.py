"""Requests for the simulator and the benchmarks: trace readers and generators fitted to public traces.

`load_workload` takes a built-in name or the path of a trace file and returns a `Workload`, which is plain
columns: arrival times, lengths, tenants, ids of prompt blocks. Nothing here knows of engines or tokens.
"""

from paceline.lab.workload.source import load_workload
from paceline.lab.workload.workload import Workload, WorkloadSummary, describe

__all__ = ["Workload", "WorkloadSummary", "describe", "load_workload"]
