"""One step: which rows compute how many tokens, who joins, and who is preempted when blocks are short."""
