"""`paceline bench`: throughput, latency, load on servers, sweeps and comparisons."""
