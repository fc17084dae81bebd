"""Metrics and traces: families, figures of the last minute, the page for Prometheus."""
