"""What is known of a model before an engine has it: its text side, and what an operator can set about its requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.llm.pairs import PooledModel
from paceline.models.files.pooling_config import EmbeddingDefaults
from paceline.models.files.sampling_defaults import GenerationDefaults
from paceline.models.media.pictures import PictureReader
from paceline.server.api.route import SERVER_LIMITS, RequestLimits
from paceline.text.tokenizer import Tokenizer
from paceline.text.tools.formats import AUTO


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """The model as far as this process knows it: its names and its text side."""

    names: tuple[str, ...]  # the first is the one that answers carry
    tokenizer: Tokenizer
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    seed: int = 0
    embedding: EmbeddingDefaults | None = None  # how texts become vectors; None: they do not
    labels: tuple[str, ...] = ()  # of a classifier
    pictures: PictureReader | None = None  # of prompts; None: it reads text only
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def pooled(self) -> PooledModel:
        return PooledModel(tokenizer=self.tokenizer, embedding=self.embedding, labels=self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What an operator can set about requests."""

    limits: RequestLimits = SERVER_LIMITS
    strict_fields: bool = False
    max_queue: int = 256  # requests that wait beside those that run
    max_queued_tokens: int | None = None  # None: a quarter of what all prompts could hold
    request_timeout_s: float | None = None  # from arrival to the end
    queue_timeout_s: float | None = None  # from arrival to the first token
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    max_thinking_tokens: int | None = None
    lora_dir: str | None = None  # below which adapters may be loaded
    media_domains: tuple[str, ...] = ()  # hosts from which pictures are fetched
