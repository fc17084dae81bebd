"""Measuring without users: simulator, benchmarks, traffic, tables and plots."""
