"""Mutants of the parts that turn plans into tokens and tokens into text: each is killed by a test that names it.

The seeds of the simulation never reach a tensor or a text, so these patches are judged by pytest: a mutant is dead when
a test named for it fails in an assertion. An error while collecting, a crash or a hang is no death.
"""
