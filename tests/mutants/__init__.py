"""Mutants: patches that break the engine in one place each, to prove that the named invariant notices.

python -m tests.mutants                      every mutant of mutants.toml
python -m tests.mutants double_free          one of them
python -m tests.mutants --survey 0:40 NAME   what kills it on each seed of a range, to choose its seeds anew
"""
