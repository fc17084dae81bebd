"""Models: one decoder with explicit options, its layers, and checkpoints (`files`)."""
