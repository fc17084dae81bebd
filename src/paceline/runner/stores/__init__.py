"""Blocks below host memory: the stores that keep them, the threads that copy, and what is opened at the start."""
