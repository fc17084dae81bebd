"""The tokens of a tokenizer as guides need them, and what makes guides of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.errors import InvalidRequest

if TYPE_CHECKING:
    from paceline.core.guide import GuideMaker
    from paceline.text.guide.matcher import Vocabulary
    from paceline.text.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer | None) -> Vocabulary:
    from paceline.text.guide.matcher import Vocabulary

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


def guide_maker(tokenizer: Tokenizer | None, *, on_gpu: bool) -> GuideMaker:
    """What makes guides of structures: nothing is read or loaded before the first of them."""
    from paceline.text.guide.compiler import GuideCompiler
    from paceline.text.guide.matcher import mask_threads

    objection = ""
    if tokenizer is None:
        objection = "structured_outputs need a tokenizer: start without skip_tokenizer_init"
    # Beside a GPU the cores have time for the masks of many rows; on a CPU they compute steps.
    # A power of two, as threads halve the rows until each has a part.
    originals = 1 << (mask_threads() - 1).bit_length() if on_gpu else 1
    return GuideCompiler(partial(vocabulary_of, tokenizer), objection, originals=originals)
