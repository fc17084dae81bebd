"""The scheduler: decides, step by step, which rows compute how many tokens. No tensors, no I/O, no wall clock."""
