"""The plain values every other part speaks in: requests, plans, results, events, clocks and protocols."""
