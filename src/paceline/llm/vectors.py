"""Vectors of texts: embeddings, scores of labels and ranked documents.

A text becomes one pooled request; many of them go through the engine together, beside whatever else it does. How pairs
of texts are scored is in `pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core.parameters import CHOICE, CLASSIFY, PoolingParams
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest, PacelineError
from paceline.llm.outputs import RequestOutput
from paceline.llm.prompts import Prompt
from paceline.models.files.pooling_config import EmbeddingDefaults

Vector = NDArray[np.float32]
FLOAT = np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingOutput:
    """One vector."""

    data: Vector

    @property
    def embedding(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    @property
    def probs(self) -> list[float]:
        return self.embedding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingRequestOutput:
    """A text and its vector."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int] = field(repr=False)
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document and how well it fits the query."""

    index: int  # in the list of documents
    document: str
    relevance_score: float


def pooled_sampling(
    defaults: EmbeddingDefaults | None,
    *,
    kind: str | None = None,
    dimensions: int | None = None,
    normalize: bool | None = None,
    raw: bool = False,
    token_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """The parameters of a request for a vector; what is None is as the model has it."""
    if kind in (CLASSIFY, CHOICE):
        scores = PoolingParams(kind=kind, raw=raw, token_ids=token_ids)
        return SamplingParams(pooling=scores, temperature=0.0, detokenize=False)
    assert defaults is not None
    if dimensions is not None and dimensions > defaults.width:
        raise InvalidRequest(
            f"dimensions: {dimensions} are asked for, and a vector of this model has {defaults.width}",
            param="dimensions",
        )
    pooling = PoolingParams(
        kind=defaults.kind,
        dimensions=dimensions,
        normalize=defaults.normalize if normalize is None else normalize,
    )
    return SamplingParams(pooling=pooling, temperature=0.0, detokenize=False)


def prompted(prompt: Prompt, defaults: EmbeddingDefaults, name: str | None) -> Prompt:
    """A text with what the model wants before it; `name` None: what it always wants."""
    chosen = defaults.default_prompt if name is None else name
    if chosen and chosen not in defaults.prompts:
        known = ", ".join(sorted(defaults.prompts)) or "none"
        raise InvalidRequest(
            f"prompt_name: {chosen!r:.64} is not among this model's prompts ({known})", param="prompt_name"
        )
    if not chosen:
        return prompt
    if not isinstance(prompt, str):
        if name:
            raise InvalidRequest(
                "prompt_name: an input of token ids is taken as it is; send texts, or leave prompt_name out",
                param="prompt_name",
            )
        return prompt
    return defaults.prompts[chosen] + prompt


def vector_of(output: RequestOutput, place: int) -> PoolingRequestOutput:
    """What a finished request came to. Raises what went wrong, with the place of its input."""
    (part,) = output.outputs
    if not part.vector:
        raise PacelineError(f"input {place} has no vector: {part.error or part.finish_reason}")
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=PoolingOutput(data=np.frombuffer(part.vector, FLOAT)),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def ranked(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[Ranked]:
    """Documents by their scores, the best first."""
    found = [
        Ranked(index=index, document=document, relevance_score=score)
        for index, (document, score) in enumerate(zip(documents, scores, strict=True))
    ]
    return sorted(found, key=lambda each: -each.relevance_score)[:top_n]
