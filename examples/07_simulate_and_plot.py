"""Simulate traffic at several rates on modelled hardware, find the knee, and draw it.

    python examples/07_simulate_and_plot.py [TRACE] [FOLDER]

TRACE is a file (Azure CSV, Mooncake JSONL, multi-tenant CSV) or the name of a generator.
"""

import sys
from pathlib import Path

from paceline import simulation as sim

trace = sys.argv[1] if len(sys.argv) > 1 else "azure-conv"
folder = Path(sys.argv[2] if len(sys.argv) > 2 else ".")
machine = sim.Machine.of(sim.model_shape("llama-3.1-8b"), sim.device_spec("h200"))

points = []
for rate in (4.0, 12.0, 20.0, 28.0, 36.0):
    load = sim.load_workload(trace, num_requests=200, seed=1, rate=rate, arrivals="poisson")
    config = sim.SimConfig(machine=machine, engine=sim.engine_config(machine, load, {"max_num_seqs": 256}))
    record = sim.simulate(config, load, label=f"{rate:g}/s")
    points.append(sim.curve_point(rate, sim.summarize(record)))
    ttft = sim.summarize(record).ttft_s
    print(f"{rate:4g}/s: TTFT p50 {ttft.p50:.3f} s, p99 {ttft.p99:.3f} s")

curve = sim.Curve(label="continuous", points=points)
print(
    f"knee: {curve.knee:g}/s, after which p99 TTFT doubles" if curve.knee else "knee: not between these rates"
)
sim.plot_throughput_latency([curve], folder / "curve.png", title=f"{trace} on {machine.device.name}")
sim.plot_timeline(record, folder / "timeline.png")
print(f"wrote {folder / 'curve.png'} and {folder / 'timeline.png'}")
