"""Vectors of texts: embeddings, and what is made of them: scores of pairs and ranked documents.

A text becomes one pooled request; many of them go through the engine together, beside whatever else it does. Pure but
for the function that runs the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core.pooling import CLASSIFY, PoolingParams
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest, PacelineError
from paceline.llm.outputs import RequestOutput
from paceline.llm.prompts import Prompt
from paceline.models.files.pooling import EmbeddingDefaults

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
    defaults: EmbeddingDefaults,
    *,
    kind: str | None = None,
    dimensions: int | None = None,
    normalize: bool | None = None,
) -> SamplingParams:
    """The parameters of a request for a vector; what is None is as the model has it."""
    if dimensions is not None and dimensions > defaults.width:
        raise InvalidRequest(
            f"dimensions: {dimensions} are asked for, and a vector of this model has {defaults.width}",
            param="dimensions",
        )
    pooling = PoolingParams(
        kind=kind or defaults.kind,
        dimensions=dimensions,
        normalize=(defaults.normalize if normalize is None else normalize) and kind != CLASSIFY,
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


def pair_up(first: str | Sequence[str], second: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """One text against many, or two lists of equal length."""
    ones, others = ([texts] if isinstance(texts, str) else list(texts) for texts in (first, second))
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others) or not ones:
        raise InvalidRequest(
            f"{len(ones)} texts and {len(others)}: give one and any number, or the same number of both",
            param="text_2",
        )
    return ones, others


def similarities(
    embed: Callable[[list[str]], list[Vector]], ones: Sequence[str], others: Sequence[str]
) -> list[float]:
    """Cosines of pairs; each text is computed once."""
    texts = list(dict.fromkeys([*ones, *others]))
    vectors = dict(zip(texts, embed(texts), strict=True))
    return [_cosine(vectors[one], vectors[other]) for one, other in zip(ones, others, strict=True)]


def _cosine(one: Vector, other: Vector) -> float:
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
