"""Pairs of texts: how a model says how well a document answers a query, and texts and pairs as prompts for vectors.

| a model                     | what is computed                          | the score                            |
|-----------------------------|-------------------------------------------|--------------------------------------|
| classifier of one label     | both texts as one input                   | sigmoid of the label                 |
| `choice` (Qwen3-Reranker)   | both texts in a prompt that asks yes or no | share of yes among the two tokens    |
| any other that makes vectors | each text once                            | cosine of their vectors              |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from paceline.core.parameters import CHOICE, CLASSIFY
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest, NeverFits
from paceline.llm.prompts import MAX_CHARS_PER_TOKEN, PreparedRequest, Prompt, PromptReader
from paceline.llm.vectors import Vector, pooled_sampling, prompted
from paceline.models.files.pooling_config import EmbeddingDefaults
from paceline.text.tokenizer import RenderedPrompt, Tokenizer

LONGEST_FIRST, ONLY_SECOND = STRATEGIES = ("longest_first", "only_second")
# By the names that models have for them.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage")
NO, YES = "no", "yes"
# What Qwen3-Reranker was trained with.
CHOICE_MARKS = ("<|im_start|>", "<|im_end|>")
CHOICE_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
CHOICE_PAIR = (
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {first}\n<Document>: {second}"
)
CHOICE_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TextPair(NamedTuple):
    """Two texts that are read as one input."""

    first: str
    second: str


PooledInput = Prompt | TextPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How inputs are made short enough."""

    is_cut: bool = False  # those that are longer than the model takes; else they are refused
    strategy: str = LONGEST_FIRST  # of pairs: the longer text loses tokens first, or the second loses all
    from_left: bool = False  # texts lose their beginning instead of their end
    document_tokens: int | None = None  # no more of each document


NOT_CUT = Cut()


@dataclass(frozen=True, kw_only=True, eq=False)
class PooledModel:
    """What a model makes of texts beside more text."""

    tokenizer: Tokenizer | None
    embedding: EmbeddingDefaults | None = None
    labels: tuple[str, ...] = ()

    @property
    def is_cross_encoder(self) -> bool:
        return len(self.labels) == 1

    @property
    def chooses(self) -> bool:
        return self.embedding is not None and self.embedding.kind == CHOICE

    @property
    def why_no_vectors(self) -> str:
        """Why a text has no vector; "" where it has one."""
        if self.embedding is None:
            return (
                "the model's files do not say what the vector of a text is; start it with --pooling last or "
                "mean, in Python load it with pooling='last' or 'mean'"
            )
        return "this model chooses between two tokens and makes no vectors" if self.chooses else ""

    @property
    def why_no_labels(self) -> str:
        return "" if self.labels else "this model has no labels: load one with a classifier"

    @cached_property
    def why_no_scores(self) -> str:
        """Why pairs have no score; "" where they have."""
        if self.is_cross_encoder:
            return ""
        if len(self.labels) > 1:
            return (
                f"this model has {len(self.labels)} labels; a pair of texts is scored by one, or by vectors"
            )
        if not self.chooses:
            return self.why_no_vectors
        known = () if self.tokenizer is None else self.tokenizer.control_tokens
        missing = [mark for mark in CHOICE_MARKS if mark not in known]
        if missing:
            return f"a choice is asked for in a prompt with {missing[0]}, which this model's tokenizer does not have"
        return "" if self.choice_ids else "this model's tokenizer has no single tokens for yes and no"

    @cached_property
    def choice_ids(self) -> tuple[int, ...]:
        """The tokens that say no and yes."""
        if self.embedding is not None and self.embedding.token_ids:
            return self.embedding.token_ids
        assert self.tokenizer is not None
        found = self.tokenizer.encode_many([NO, YES])
        return tuple(ids[0] for ids in found) if all(len(ids) == 1 for ids in found) else ()

    @cached_property
    def choice_marks(self) -> tuple[list[int], list[int]]:
        """What stands before and behind a pair."""
        assert self.tokenizer is not None
        return _template_ids(self.tokenizer, CHOICE_BEGIN), _template_ids(self.tokenizer, CHOICE_END)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Inputs whose vectors say what pairs score."""

    inputs: tuple[PooledInput, ...]
    sampling: SamplingParams
    sources: tuple[int, ...]  # of each input, the first pair it is of
    num_first: int = 0  # inputs that are first texts only; those behind them hold second ones
    compared: tuple[tuple[int, int], ...] | None = None  # inputs whose cosines are the scores

    def scores(self, vectors: Sequence[Vector]) -> list[float]:
        """One for each pair, in their order."""
        found = np.stack(vectors).astype(np.float64)
        if self.compared is not None:
            found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
            ones, others = np.array(self.compared).T
            values: list[float] = np.einsum("pw,pw->p", found[ones], found[others]).tolist()
            return values
        pooling = self.sampling.pooling
        assert pooling is not None
        if pooling.kind == CHOICE:
            found = found[:, 1] - found[:, 0] if pooling.raw else found[:, 1]
        values = found.reshape(len(vectors)).tolist()
        return values


def plan_pairs(
    model: PooledModel, ones: Sequence[str], others: Sequence[str], *, raw: bool = False
) -> PairPlan:
    """How a model scores each of `ones` with its counterpart among `others`; every route and method asks here.

    `raw`: what sigmoid or softmax would be applied to. Raises InvalidRequest for a model that scores nothing.
    """
    if reason := model.why_no_scores:
        raise InvalidRequest(reason, param="model")
    places = tuple(range(len(ones)))
    defaults = model.embedding
    if model.is_cross_encoder or defaults is None or model.chooses:
        kind = CLASSIFY if model.is_cross_encoder else CHOICE
        ids = model.choice_ids if kind == CHOICE else ()
        sampling = pooled_sampling(defaults, kind=kind, raw=raw, token_ids=ids)
        return PairPlan(inputs=tuple(map(TextPair, ones, others)), sampling=sampling, sources=places)
    queries, documents = _places(ones), _places(others)
    inputs = (
        *(prompted(text, defaults, _own_prompt(defaults, QUERY_PROMPTS)) for text in queries),
        *(prompted(text, defaults, _own_prompt(defaults, DOCUMENT_PROMPTS)) for text in documents),
    )
    place_of = [{text: place for place, text in enumerate(side)} for side in (queries, documents)]
    return PairPlan(
        inputs=inputs,
        sampling=pooled_sampling(defaults),
        sources=(*queries.values(), *documents.values()),
        num_first=len(queries),
        compared=tuple(
            (place_of[0][one], len(queries) + place_of[1][other])
            for one, other in zip(ones, others, strict=True)
        ),
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


def _places(texts: Sequence[str]) -> dict[str, int]:
    """Each text once, with its first place."""
    found: dict[str, int] = {}
    for place, text in enumerate(texts):
        found.setdefault(text, place)
    return found


def _own_prompt(defaults: EmbeddingDefaults, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in defaults.prompts), None)


class InputReader:
    """Texts, token ids and pairs of texts as requests that end with a vector."""

    def __init__(self, model: PooledModel, reader: PromptReader, max_model_len: int) -> None:
        self._model = model
        self._reader = reader
        self._longest = max_model_len

    def read(
        self,
        inputs: Sequence[PooledInput],
        sampling: SamplingParams,
        name: Callable[[int], str],
        cut: Cut = NOT_CUT,
        num_first: int = 0,
    ) -> list[PreparedRequest]:
        """`num_first` inputs are no documents. What is wrong with one is said with its `name`."""
        longest, defaults = self._longest, self._model.embedding
        if cut.is_cut and defaults is not None:
            longest = min(longest, defaults.max_length or longest)
        prepared = []
        try:
            index, known = 0, self._ids(inputs, longest, cut)
            for index, given in enumerate(inputs):
                if isinstance(given, TextPair):
                    ids, own = self._pair(given, known, sampling, longest, cut)
                elif isinstance(given, str):
                    most = cut.document_tokens if index >= num_first else None
                    ids, own = self._text(known[given][:most], longest, cut), sampling
                elif isinstance(given, list):
                    ids, own = given, sampling
                    if cut.is_cut:
                        ids = given[-longest:] if cut.from_left else given[:longest]
                else:
                    prepared.append(self._reader.read(given, sampling))
                    continue
                if len(ids) > longest:
                    raise NeverFits(
                        f"This model's maximum context length is {longest} tokens; the input has {len(ids)}; "
                        "shorten it, or ask for it to be cut with truncate"
                    )
                prepared.append(self._reader.prepare(None, ids, own))
        except InvalidRequest as error:
            raise type(error)(f"{name(index)}: {error}", param=name(index)) from None
        return prepared

    def _ids(self, inputs: Sequence[PooledInput], longest: int, cut: Cut) -> dict[str, list[int]]:
        """The tokens of each text. No text is read beyond what could be as many tokens as it may have."""
        asks = self._model.chooses and not self._model.is_cross_encoder
        texts = dict.fromkeys(chain.from_iterable(_texts(given, asks) for given in inputs))
        if not texts:
            return {}
        tokenizer, most = self._model.tokenizer, longest * MAX_CHARS_PER_TOKEN
        if tokenizer is None:
            raise InvalidRequest("the engine was started without a tokenizer: give token ids")
        from_left = cut.from_left and not asks
        shown = [text if len(text) <= most else text[-most:] if from_left else text[:most] for text in texts]
        return dict(zip(texts, tokenizer.encode_many(shown), strict=True))

    def _text(self, ids: list[int], longest: int, cut: Cut) -> list[int]:
        """What stands around a text stays there when it is cut."""
        assert self._model.tokenizer is not None
        before, behind = self._model.tokenizer.around
        if cut.is_cut:
            ids = _shortened(ids, longest - len(before) - len(behind), cut)
        return [*before, *ids, *behind]

    def _pair(
        self, pair: TextPair, known: dict[str, list[int]], sampling: SamplingParams, longest: int, cut: Cut
    ) -> tuple[list[int], SamplingParams]:
        if self._model.is_cross_encoder or not self._model.chooses:
            return self._marked_pair(pair, known, sampling, longest, cut)
        tokenizer, (before, behind) = self._model.tokenizer, self._model.choice_marks
        assert tokenizer is not None
        ids, most = known[_asked(pair)], cut.document_tokens
        if most is not None:
            (own,) = tokenizer.encode_many([pair.second])
            if len(own) > most:
                (ids,) = tokenizer.encode_many([_asked(TextPair(pair.first, tokenizer.decode(own[:most])))])
        if cut.is_cut:  # the document stands last and loses its end
            ids = ids[: max(0, longest - len(before) - len(behind))]
        return [*before, *ids, *behind], sampling

    def _marked_pair(
        self, pair: TextPair, known: dict[str, list[int]], sampling: SamplingParams, longest: int, cut: Cut
    ) -> tuple[list[int], SamplingParams]:
        assert self._model.tokenizer is not None
        marks = self._model.tokenizer.pair_marks
        first, second = known[pair.first], known[pair.second][: cut.document_tokens]
        if cut.is_cut:
            room = longest - marks.num_tokens
            ones, others = fitted(len(first), len(second), room, cut.strategy)
            first, second = _shortened(first, ones, cut), _shortened(second, others, cut)
        begin = [*marks.before, *first, *marks.between]
        if marks.has_types and sampling.pooling is not None:
            sampling = replace(sampling, pooling=replace(sampling.pooling, second_at=len(begin)))
        return [*begin, *second, *marks.behind], sampling


def fitted(first: int, second: int, room: int, strategy: str) -> tuple[int, int]:
    """Tokens that are left of two texts, by the rules of transformers."""
    if first + second <= room:
        return first, second
    if strategy == ONLY_SECOND:
        if first >= room:
            raise InvalidRequest(
                f"its first text has {first} tokens and leaves no room for the second; there is room for {room}"
            )
        return first, room - first
    least = min(first, second)
    if 2 * least <= room:
        return (first, room - first) if first == least else (room - second, second)
    half = room // 2  # of an odd number, the longer text has one more
    return (half + room % 2, half) if first > second else (half, room - half)


def _texts(given: PooledInput, asks: bool) -> tuple[str, ...]:
    if isinstance(given, TextPair):
        return (_asked(given),) if asks else given
    return (given,) if isinstance(given, str) else ()


def _asked(pair: TextPair) -> str:
    return CHOICE_PAIR.format(first=pair.first, second=pair.second)


def _shortened(ids: list[int], most: int, cut: Cut) -> list[int]:
    most = max(0, most)
    return ids[len(ids) - min(most, len(ids)) :] if cut.from_left else ids[:most]


def _template_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text of ours, whose marks are control tokens."""
    controls = []
    for mark in CHOICE_MARKS:
        at = text.find(mark)
        while at >= 0:
            controls.append((at, at + len(mark)))
            at = text.find(mark, at + 1)
    return tokenizer.encode_template(RenderedPrompt(text=text, controls=tuple(sorted(controls))))
