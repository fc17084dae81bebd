"""Models on disk: which files there are, what they say about the model, and the bytes of each tensor. No torch."""
