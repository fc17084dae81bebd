"""What `LLM` and `AsyncLLM` share: a loaded model, and the way of a request from text to tokens and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from paceline.core.adapter import NO_ADAPTER
from paceline.core.request import DEFAULT_TENANT, RequestState, TreeLimits
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_LEVEL, ServiceLevel
from paceline.errors import EngineFailed, InvalidRequest
from paceline.factory import LoadedModel, load_model
from paceline.llm.adapters import NamedAdapters
from paceline.llm.arguments import split_arguments, unsupported_method
from paceline.llm.collector import Collector
from paceline.llm.outputs import RequestOutput
from paceline.llm.pairs import InputReader, PooledModel
from paceline.llm.prompts import (
    ChatPrompts,
    Messages,
    PreparedRequest,
    Prompt,
    PromptReader,
    prepared_chat,
)
from paceline.models.files.pooling_config import EmbeddingDefaults
from paceline.models.files.sampling_defaults import chat_sampling, default_sampling
from paceline.models.media.pictures import open_pictures
from paceline.text.guide.check import check
from paceline.text.tokenizer import Tokenizer
from paceline.text.tools.call_grammar import with_tool_named

_logger = logging.getLogger("paceline")
_COMPILING_S = 0.001


class Frontend:
    """Everything around one engine that knows text."""

    def __init__(self, model: str | None, options: Mapping[str, Any], *, interactive: bool) -> None:
        model_config, given = split_arguments(model, options)
        self.loaded = loaded = load_model(model_config, given, interactive=interactive)
        self.description = _description(loaded)
        for notice in loaded.notices:
            _logger.warning(notice)
        self.engine = loaded.engine
        self.adapters = NamedAdapters(loaded.engine)
        self.tokenizer = loaded.tokenizer
        self.max_model_len = loaded.config.scheduler.max_model_len
        self.collector = Collector(loaded.tokenizer, loaded.engine.scheduler.finish_at, self.max_model_len)
        self.pooled = PooledModel(
            tokenizer=loaded.tokenizer, embedding=loaded.embedding, labels=loaded.checkpoint.spec.labels
        )
        self.pictures = open_pictures(loaded.checkpoint.path, model_config)
        self._chat = ChatPrompts(loaded.tokenizer, pictures=self.pictures)
        self._reader = PromptReader(
            loaded.tokenizer,
            vocab_size=loaded.checkpoint.spec.vocab_size,
            max_model_len=self.max_model_len,
            seed=model_config.seed,
        )
        self.inputs = InputReader(self.pooled, self._reader, self.max_model_len)

    @property
    def embedding(self) -> EmbeddingDefaults:
        """How texts become vectors. Raises InvalidRequest where they do not."""
        if reason := self.pooled.why_no_vectors:
            raise InvalidRequest(reason, param="pooling")
        assert self.pooled.embedding is not None
        return self.pooled.embedding

    @property
    def default_sampling(self) -> SamplingParams:
        """Sampling of a text that is continued without any being given."""
        return default_sampling(self.loaded.checkpoint.generation)

    @property
    def chat_sampling(self) -> SamplingParams:
        """Sampling of a conversation without any being given: as long as the context allows."""
        return chat_sampling(self.loaded.checkpoint.generation, self.max_model_len)

    def read(self, prompt: Prompt, sampling: SamplingParams) -> PreparedRequest:
        _check_structure(sampling)
        return self._reader.read(prompt, sampling)

    def read_chat(
        self, messages: Messages, sampling: SamplingParams, *, is_local: bool = True, **template: Any
    ) -> PreparedRequest:
        """A conversation through the chat template; `template` is what `ChatPrompts.render` takes."""
        _check_structure(sampling)
        rendered = self._chat.render(
            messages, structure=sampling.structured_outputs, is_local=is_local, **template
        )
        chat = rendered.chat
        use = template.get("use")
        if use is not None and use.follows_schemas and chat.structure is not None:
            try:
                check(chat.structure, "tools")
            except InvalidRequest as error:
                raise with_tool_named(error, chat.structure, use) from None
        prepared = prepared_chat(self._reader, rendered, sampling)
        return self._chat.decoded(prepared, DEFAULT_TENANT)

    def fork(
        self,
        name: str,
        branch: int,
        count: int,
        *,
        at: int | None = None,
        append: str | Sequence[int] = (),
        score: float = 0.0,
        changes: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Branch one output of a request under way; returns the indexes of the new outputs."""
        parent = self.collector.branch_id(name, branch)
        point = self.collector.fork_point(parent, at)
        tokens = self._reader.read_inserted(append, "append")
        sampling, changed = self._reader.read_changes(self.collector.sampling_of(parent), changes or {})
        ids = self.engine.fork(
            point.source.id,
            count,
            at=point.engine_at,
            append=[*point.between, *tokens],
            score=score,
            changes=changed,
        )
        return self.collector.fork(point, tokens, sampling, ids)

    def extend(
        self, name: str, branch: int, given: str | Sequence[int], *, max_tokens: int | None = None
    ) -> None:
        """Put tokens behind what an output has, and let it go on."""
        tokens = self._reader.read_inserted(given, "text")
        request_id = self.collector.branch_id(name, branch)
        request = self.engine.scheduler.state.requests[request_id]
        if tokens or max_tokens is not None or self.collector.is_held(request_id):
            self.engine.extend(request_id, tokens, max_tokens=max_tokens)
            if not tokens:  # no event tells it
                self.collector.end_hold(request_id)
        if request.state is RequestState.PAUSED:
            self.engine.scheduler.resume(request_id)

    def open_tree(
        self,
        name: str,
        prepared: PreparedRequest,
        limits: TreeLimits,
        arrival_s: float,
        *,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        tenant: str = DEFAULT_TENANT,
        adapter: int = NO_ADAPTER,
    ) -> RequestOutput:
        """Add a prompt that generates nothing before it is told to: branches are made of it."""
        engine = self.engine
        (root,) = engine.add(
            prepared.token_ids,
            prepared.sampling,
            service_level=service_level,
            tenant=tenant,
            arrival_s=arrival_s,
            tree=limits,
            adapter=adapter,
            media=prepared.media,
        )
        output = self.collector.open(name, prepared, [root], arrival_s)
        while engine.scheduler.state.requests[root].state is RequestState.BLOCKED:  # its grammar is compiled
            time.sleep(_COMPILING_S)
            engine.guides.let_in()
        engine.scheduler.pause(root)
        return output

    def until(
        self, name: str, branch: int, stops: tuple[str, ...], max_tokens: int | None, num_seen: int
    ) -> None:
        """Have an output go on to one of these texts. A hold that its reader has not seen (beyond `num_seen`) is no
        place to go on from: then the texts are looked for in what it has generated until there."""
        collector, request_id = self.collector, self.collector.branch_id(name, branch)
        sampling, _ = self._reader.read_changes(collector.sampling_of(request_id), {"stop": stops})
        request = self.engine.scheduler.state.requests[request_id]
        is_held, num_holds = collector.is_held(request_id), collector.num_holds(request_id)
        goes_on = request.state is RequestState.PAUSED or (is_held and num_holds <= num_seen)
        is_cut = collector.stop_at(request_id, sampling, is_new=goes_on)
        if goes_on or (max_tokens is not None and not is_held and not is_cut):
            self.extend(name, branch, (), max_tokens=max_tokens)

    def set_score(self, name: str, branch: int, score: float) -> None:
        self.engine.set_score(self.collector.branch_id(name, branch), score)

    def prune(self, name: str, branch: int) -> None:
        self.engine.prune(self.collector.branch_id(name, branch))

    def end_tree(self, name: str) -> None:
        """End what is left of a request."""
        for request_id in self.collector.ids_of(name):
            self.engine.prune(request_id)

    def read_tree(
        self, prompt: Prompt | Messages, sampling: SamplingParams, hold_s: float
    ) -> PreparedRequest:
        """The root of a tree: a prompt or a conversation, whose branches are held at their ends."""
        own = replace(sampling, on_stop="hold", hold_s=hold_s)
        if own.n != 1:
            raise InvalidRequest("a tree has one root: fork it instead of n", param="n")
        is_chat = not isinstance(prompt, str | Mapping) and prompt and isinstance(prompt[0], Mapping)
        return self.read_chat(prompt, own) if is_chat else self.read(prompt, own)  # type: ignore[arg-type]

    def count_chat(self, messages: Messages) -> int:
        """How many tokens a conversation has as a prompt."""
        return len(self._chat.render(messages, is_local=True).ids)


def _check_structure(sampling: SamplingParams) -> None:
    if sampling.structured_outputs is not None:
        check(sampling.structured_outputs)


def _description(loaded: LoadedModel) -> str:
    scheduler, hardware = loaded.config.scheduler, loaded.hardware
    return (
        f"model={loaded.checkpoint.path.stem!r}, device={hardware.device!r}, dtype={hardware.dtype!r}, "
        f"rows={scheduler.max_num_seqs}, blocks={loaded.config.kv.num_blocks}"
    )


class ModelHolder:
    """What `LLM` and `AsyncLLM` tell about the model they hold."""

    def __init__(self, front: Frontend) -> None:
        self._held: Frontend | None = front
        self._description = front.description

    def __repr__(self) -> str:
        closed = ", closed" if self._held is None else ""
        return f"{type(self).__name__}({self._description}{closed})"

    def __getattr__(self, name: str) -> NoReturn:
        error = unsupported_method(type(self).__name__, name)
        raise error or AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _front(self) -> Frontend:
        if self._held is None:
            raise EngineFailed("the engine has stopped: it was shut down")
        return self._held

    @property
    def loaded(self) -> LoadedModel:
        return self._front.loaded

    @property
    def max_model_len(self) -> int:
        return self._front.max_model_len

    def get_tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model recommends, or the defaults for models that recommend nothing."""
        return self._front.default_sampling
