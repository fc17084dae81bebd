"""One step: which rows compute how many tokens, which requests join, and which are preempted when blocks are short."""
