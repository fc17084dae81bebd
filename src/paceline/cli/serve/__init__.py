"""`paceline serve`: flags, the run, the start card."""
