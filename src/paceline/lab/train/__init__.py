"""Training draft heads: texts of a model, its hidden states over them, and the head that learns from these."""
