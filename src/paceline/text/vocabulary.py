"""The tokens of a model as guides see them."""

from __future__ import annotations

from functools import partial

from paceline.errors import InvalidRequest
from paceline.guide.matcher import Vocabulary
from paceline.text.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer | None) -> Vocabulary:
    """What guides need to know of a tokenizer; None: there is none."""
    table = None if tokenizer is None else tokenizer.table
    if tokenizer is None or table is None:
        raise InvalidRequest(
            "structured_outputs: the tokens of this model have no bytes of their own",
            param="structured_outputs",
        )
    return Vocabulary(
        bytes_of=table.bytes_of,
        control=tokenizer.control_tokens,
        special_ids=frozenset(tokenizer.special_ids),
        eos_token_ids=tokenizer.eos_token_ids,
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )
