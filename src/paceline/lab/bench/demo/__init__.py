"""The demonstration: the same bursts of traffic under static, dynamic and continuous batching, on this machine."""
