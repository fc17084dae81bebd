"""Load on a server over HTTP, and what its clients see: the part of `paceline bench serve` that sends and times.

`generator` sends requests of a `prompt_source` when they are due, over connections of a `pool`; `reader` times the
answers.
Nothing here prints, and nothing here knows which server answers.
"""
