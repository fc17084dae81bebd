"""Tests of Paceline. A package, so that `python -m tests.dst` and `from tests.fakes import ...` work."""
