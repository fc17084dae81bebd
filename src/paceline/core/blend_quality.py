"""What placing texts in a prompt keeps of a model's answers, as far as it is known.

"Kept" is 1 - KL / KL(passages left out): of what passages change in the model's next tokens, the part that is still
there when their KV was computed alone. A model has earned it from `LEAST_KEPT` on.
Decision: docs/decisions/0055-contexts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LEAST_KEPT = 0.85
FLAG = "--context-reuse blend"


class PromptPart(NamedTuple):
    tokens: tuple[int, ...]
    is_placed: bool


# A prompt with passages that are placed in it, and a question behind the last of them.
PassagePrompt = tuple[PromptPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blending:
    """Of one model, on one device."""

    objection: str = ""  # why no texts can be placed, whatever that would keep
    kept: float | None = None  # None: not measured
    agreement: float = 0.0  # how often the likeliest next token is the same
    divergence: float = 0.0  # KL, nats
    left_out: float = 0.0  # KL without the passages, nats
    num_prompts: int = 0

    @property
    def refusal(self) -> str:
        """Why `blend` is not offered; empty: it is."""
        if self.objection:
            return self.objection
        if self.kept is None:
            return (
                f"what blending keeps of this model's answers was not measured; start the server with {FLAG}"
            )
        if self.kept < LEAST_KEPT:
            return (
                f"blending keeps {self.kept:.1%} of what passages change in this model's answers; it is offered from "
                f"{LEAST_KEPT:.0%} on"
            )
        return ""


UNKNOWN = Blending()


def notices_of(known: Blending, *, is_wanted: bool) -> tuple[str, ...]:
    """Sentences for the operator of a server; `is_wanted`: it was started to offer blending."""
    return (f"contexts are not blended: {known.refusal}",) if is_wanted and known.refusal else ()
