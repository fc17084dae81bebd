"""Write a scheduling policy and try it in the simulator beside the order of arrival, on the same traffic.

python examples/06_write_a_policy.py
PYTHONPATH=examples paceline serve --scheduling-policy 06_write_a_policy:ShortPromptsFirst
"""

import numpy as np

from paceline.core.policy import Victim
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.report.summary import summarize
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload import load_workload


class ShortPromptsFirst:
    """A thousand tokens of prompt are worth two seconds of waiting; nobody is put back by more than eight."""

    def __init__(self, config):
        self._share = config.long_prefill_share

    def order(self, view):
        return view.arrival_s + np.minimum(view.num_prompt * 0.002, 8.0)

    def victim(self, view, need):
        return Victim(int(np.lexsort((view.order, self.order(view)))[-1]))

    def share(self, view, budget):
        return max(1, int(budget * self._share))


if __name__ == "__main__":
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
    load = load_workload("azure-code", num_requests=150, seed=3, rate=16.0, arrivals="poisson")
    for policy in ("fcfs", "__main__:ShortPromptsFirst"):
        engine = engine_config(machine, load, {"scheduling_policy": policy})
        times = summarize(simulate(SimConfig(machine=machine, engine=engine), load)).ttft_s
        print(f"{policy.partition(':')[2] or policy}: TTFT p50 {times.p50:.2f} s, p99 {times.p99:.2f} s")
