"""Measuring the engine on workloads that are the same on every machine: `paceline bench`."""
