"""Paceline: an LLM inference engine built around continuous batching.

This module holds the version and nothing else, so that importing `paceline` stays free of side effects.
It must not import any other part of the package; callers name the module they want.
"""

__version__ = "0.1.0"
