"""What a run leaves: run log, decision trail, explanations, timelines.

`runlog` writes and reads the log, `codec` knows how each value stands in it, `linefile` the file underneath.
The log holds no text and no token ids. This package replays nothing and fits nothing: it hands out what was
recorded.
"""
