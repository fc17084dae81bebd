"""Mixed traffic on a real server for minutes or hours, and what must be true of it afterwards.

`python -m tests.soak --minutes 60` is the long run (`make soak MINUTES=60`); `test_soak` runs the same for three.
"""
