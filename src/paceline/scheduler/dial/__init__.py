"""The dial: one place between latency and throughput, set by hand or moved by a controller that holds a target."""
