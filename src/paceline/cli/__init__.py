"""The `paceline` command: one file per command, and the edge where errors become a line and an exit code."""
