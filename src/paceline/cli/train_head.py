"""`paceline train-head`: train the head that makes drafts for a model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from paceline.cli.command import Command
from paceline.config.options import from_values
from paceline.errors import InputError
from paceline.lab.train.train_options import TrainHeadOptions

HELP = """
Train a head that makes drafts for a model.

  paceline train-head smollm2 --text texts.json --out head --minutes 20
  paceline train-head ./my-model --prompts ask.jsonl --out head --kind medusa
  paceline serve --speculative-config '{"model": "head"}'

It learns from the model's answers to prompts, or from texts as they are, on a GPU where there is one. Every minute it
writes the head and prints how many of its guesses on held-out texts the model would take, by depth. Run again, it
goes on where it was stopped.
"""


def train(given: Mapping[str, Any]) -> None:
    options = from_values(TrainHeadOptions, given)
    if find_spec("torch") is None:
        raise InputError("training needs torch, which is not installed: pip install 'paceline[torch]'")
    from paceline.lab.train.head import train_head

    trained = train_head(options)
    first = trained.acceptance[0] if trained.acceptance else 0.0
    print(f"Wrote {trained.path}: {first:.0%} of first drafts are taken on held-out texts")
    print(f"""paceline serve --speculative-config '{{"model": "{trained.path}"}}' uses it.""")


TRAIN_HEAD = Command(name="train-head", help=HELP, run=train, takes=(TrainHeadOptions,))
