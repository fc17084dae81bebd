"""The runner on an NVIDIA GPU: rows live on the device, a step sends what changed, tokens come back one step late.

`runner.py` is the seam, `row_memory.py` the rows, `forward.py` the model on the kernels, `device_attention.py` what
ties tokens of a row together, `kv_pools.py` keys and values, `graphs.py` whole decode steps captured once.
"""
