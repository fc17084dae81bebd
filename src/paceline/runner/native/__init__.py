"""The runner for CPUs: a decoder step as one compiled call, without torch."""
