"""The decoder: one transformer with explicit options, and the layers it is made of."""
