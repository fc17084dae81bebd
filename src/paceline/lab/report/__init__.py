"""What a run achieved: one record in, numbers, tables and pictures out.

`run_record` is what the simulator and the benchmarks write down, `summary` turns it into the measures, `table`
and `plots` show them. This package times nothing and runs nothing; it does not know where a record came from.
"""
