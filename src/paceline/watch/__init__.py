"""Watching an engine: what happened in its steps since the last delta, and its state now."""
