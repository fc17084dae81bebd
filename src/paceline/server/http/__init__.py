"""The plumbing of HTTP: connections and their limits, strict bodies, routes, answers and streams."""
