"""Write a scheduling policy and try it in the simulator beside the order of arrival, on the same traffic.

python examples/06_write_a_policy.py
PYTHONPATH=examples paceline serve --scheduling-policy 06_write_a_policy:ShortPromptsFirst
"""

import numpy as np

from paceline.policy import Policy
from paceline.simulation import (
    Machine,
    SimConfig,
    device_spec,
    engine_config,
    load_workload,
    model_shape,
    simulate,
    summarize,
)


class ShortPromptsFirst(Policy):
    """A thousand prompt tokens count as two seconds of waiting, and no request is put back by more than eight."""

    def order(self, view):
        return view.arrival_s + np.minimum(view.num_prompt * 0.002, 8.0)


if __name__ == "__main__":
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
    load = load_workload("azure-code", num_requests=150, seed=3, rate=16.0, arrivals="poisson")
    for policy in ("fcfs", "__main__:ShortPromptsFirst"):
        engine = engine_config(machine, load, {"scheduling_policy": policy})
        times = summarize(simulate(SimConfig(machine=machine, engine=engine), load)).ttft_s
        print(f"{policy.partition(':')[2] or policy}: TTFT p50 {times.p50:.2f} s, p99 {times.p99:.2f} s")
