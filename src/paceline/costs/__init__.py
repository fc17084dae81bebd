"""What a step costs in seconds, before it runs.

One question, `CostModel.step_seconds(shape)`, answered from a device's published and measured rates
(`roofline`) or from step times that were observed (`fit`). Used by the simulator, policies, admission and
the runner. This package knows nothing of requests, schedulers or clocks; it is numbers in, seconds out.
"""
