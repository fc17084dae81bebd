"""What the routes share: the engine, the model's text side, admission and the way a body becomes a generation.

A body is checked first, then a permit is taken, then the prompt is rendered and tokenised (off the event loop unless
it is short), then the engine hears of it. Knows nothing of HTTP and of the shapes of answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar, cast

from paceline.core.adapter import NO_INFO, AdapterInfo
from paceline.core.request import SALT
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import ServiceLevel
from paceline.core.standing import Standing
from paceline.core.stretch import PromptParts
from paceline.core.structure import Structure
from paceline.errors import DeadlineInfeasible, InvalidRequest, QueueFull
from paceline.llm.pairs import InputReader
from paceline.llm.prompts import ChatPrompts, PreparedRequest, PromptReader, RenderedChat, prepared_chat
from paceline.models.media.sources import has_pictures
from paceline.process.client import EngineClient, EngineInfo, EngineState, EngineStream, EngineUnavailable
from paceline.server.api.openai_requests import ModelFacts, ParsedBody
from paceline.server.api.structures import STRUCTURE_FIELDS
from paceline.server.billing.billing import Billing
from paceline.server.billing.pricing import Quote
from paceline.server.call import Call
from paceline.server.errors import UnknownModel
from paceline.server.generate.context_store import Contexts, InsertedText
from paceline.server.generate.estimates import Estimate
from paceline.server.generate.generation import ForkStart, Generation
from paceline.server.generate.media_work import MediaSources, MediaWork
from paceline.server.generate.pooled import feed, prepare_inputs
from paceline.server.generate.prompt_size import check_blend, check_length, check_prompt
from paceline.server.generate.request_admission import Permit, RequestAdmission, ServerCapacity
from paceline.server.generate.request_record import Observer, record_of
from paceline.server.generate.requests import Explanations, Recent, RecentRequests, service_level_of
from paceline.server.generate.searching import Found, TreeOverClient
from paceline.server.generate.served_model import ServedModel, ServiceSettings
from paceline.server.generate.trees import ForkAsked, LiveBranch, LiveBranches
from paceline.text.guide.check import FIELD
from paceline.text.guide.checkers import GrammarChecker
from paceline.text.tools.call_grammar import with_tool_named

# A shorter prompt is tokenised faster than another thread takes over.
INLINE_CHARS = 1_000
NUM_THREADS = 2
CHARS_PER_TOKEN = 4  # a guess on arrival, before anything is tokenised
STEPS_AHEAD = 3  # that the inputs of one call fill: one is computed, one is planned, one is on its way

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LoadedModel:
    """What follows from an engine that has loaded its model."""

    info: EngineInfo
    facts: ModelFacts
    reader: PromptReader
    inputs: InputReader


class _Admitted(NamedTuple):
    """A request that may be handed to the engine."""

    permit: Permit
    prepared: list[PreparedRequest]
    ignored: tuple[str, ...]
    service_level: ServiceLevel
    quote: Quote
    adapter: AdapterInfo  # as it is when the engine hears of the request: nothing is waited for in between


class Service:
    """One model behind one engine."""

    def __init__(
        self,
        client: EngineClient,
        model: ServedModel,
        settings: ServiceSettings | None = None,
        *,
        observer: Observer,
        billing: Billing | None = None,
        by_tenant: dict[str, int] | None = None,
    ) -> None:
        """`by_tenant`: places that tenants have taken, where several models count them together."""
        self.client = client
        self.model = model
        self.tokenizer = model.tokenizer
        self.settings = settings or ServiceSettings()
        self.observer = observer
        capacity = ServerCapacity(places=self.settings.max_queue, queued_tokens=0)
        self.admission = RequestAdmission(capacity, lambda: client.stats.next_place_s, by_tenant)
        self.recent = RecentRequests()
        self.explanations = Explanations(client, self.recent)
        self.live, self.contexts = LiveBranches(), Contexts()
        self.billing = billing or Billing()
        self._chat = ChatPrompts(
            model.tokenizer,
            pictures=model.pictures,
            tool_call_parser=self.settings.tool_call_parser,
            reasoning_parser=self.settings.reasoning_parser,
            max_thinking_tokens=self.settings.max_thinking_tokens,
        )
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="paceline-text")
        self.media_sources = MediaSources(self.settings.media_domains)
        self._pixels = MediaWork(self._chat)
        self._checker = GrammarChecker()
        self._known: _LoadedModel | None = None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pixels.close()
        self._checker.close()

    @property
    def facts(self) -> ModelFacts:
        """Raises EngineUnavailable before the model is loaded for the first time."""
        return self._loaded().facts

    def check_ready(self, call: Call) -> None:
        """Refuse at once what cannot be answered now, before its body is looked at."""
        self.check_loaded()
        self.billing.check()
        self.admission.check_arrival(call.caller)

    def check_loaded(self) -> None:
        """Raises EngineUnavailable when no engine is there to answer."""
        state = self.client.state
        if state is not EngineState.READY and self.client.waits_for_engine:
            self._loaded()
            return
        if state is EngineState.STARTING:
            raise EngineUnavailable("the model is being loaded; try again in a moment", code="starting")
        if state is not EngineState.READY:
            raise EngineUnavailable("the engine is not available; try again in a moment")
        if self.client.stats.standing is Standing.FAILED:
            raise EngineUnavailable("the model could not be woken", code="model_unavailable")
        self._loaded()

    async def estimate(self, call: Call, body: ParsedBody) -> Estimate:
        """When a request of one prompt would be served if it came now."""
        service_level = self._service_level(call, body)
        known = self._loaded()
        size = self.check_prompt(body)
        async with self.with_pictures(call, body) as seen:
            (prepared,) = await self.work(
                lambda: [self._chat.priced(each) for each in self._prepare(seen, known)],
                inline=self.is_short(seen, size),
            )
        ids, (sampling, parts) = prepared.token_ids, self._pinned(call, body, prepared)
        num_output = sampling.n * sampling.max_tokens
        quote = self.billing.quote(
            self.client, call.caller, service_level.service_class, self.admission.places_taken
        )
        forecast, refusal = None, None
        try:
            self._quote(call, body, service_level.service_class)  # with the price it accepts
            tenant, adapter = self._tenant(call, body), self._adapter(body).number
            forecast = await self.client.forecast(
                ids,
                sampling,
                tenant=tenant,
                service_level=service_level,
                adapter=adapter,
                parts=parts,
            )
            self.admission.check_places(call.caller, sampling.n, len(ids))
            if call.allowance is not None:
                call.allowance.check_charge(len(ids), num_output)
        except (InvalidRequest, QueueFull, DeadlineInfeasible) as error:
            refusal = error
        return Estimate(
            num_prompt=len(ids),
            max_tokens=num_output,
            num_answers=sampling.n,
            num_image=prepared.num_image,
            block_size=known.info.block_size,
            quote=quote,
            forecast=forecast,
            refusal=refusal,
        )

    async def start(self, call: Call, body: ParsedBody) -> Generation:
        """From a checked body to a request under way. The caller closes what it gets."""
        try:
            return await self._start(call, body)
        except (QueueFull, DeadlineInfeasible) as error:  # it can be asked later why
            self.recent.note(call.id, call.caller, refusal=str(error))
            raise

    async def _start(self, call: Call, body: ParsedBody) -> Generation:
        if body.sampling.on_stop == "hold" and not body.is_stream:
            raise InvalidRequest(
                "an answer can be held only while it is streamed: set stream to true", param="on_stop"
            )
        is_pooled = body.sampling.pooling is not None
        admitted = await self._admit(call, body, 1 if is_pooled else body.num_branches)
        permit, prepared, ignored, service_level, quote, adapter = admitted
        try:
            started = self._submit(call, body, prepared, service_level, adapter.number)
        except BaseException:
            permit.release()
            raise
        record = record_of(call, body, prepared, service_level.service_class)
        record.adapter = adapter.identity
        record.model = self.model.names[0]
        record.shows_receipt = self.billing.wants_receipt(call)
        record.charge = self.billing.open(quote, record, body.model, hides_output=body.only_echoes)
        try:
            generation = Generation(
                started,
                self.tokenizer,
                permit,
                record,
                self.observer,
                first_token_timeout_s=None if call.caller.batch_id else self.settings.queue_timeout_s,
                timeout_s=None if call.caller.batch_id else self.settings.request_timeout_s,
            )
            generation.ignored = ignored
            if is_pooled:
                sizes = [len(prompt.token_ids) for prompt, _ in started]
                generation.at_once = self._window(sum(sizes), len(sizes))
            else:
                self.live.note(call.id, body, call.route, generation)
            return generation
        except BaseException:  # no caller has it and could close it
            record.charge.give_up(record)
            for _, stream in started:
                stream.close()
            permit.release()
            raise

    async def _admit(self, call: Call, body: ParsedBody, places: int) -> _Admitted:
        """A checked body with its places and its tokens. The caller releases the permit."""
        service_level = self._service_level(call, body)
        known = self._loaded()
        quote = self._quote(call, body, service_level.service_class)
        size = self.check_prompt(body)
        # Of a call that is fed in a window, only what the window holds waits at a time.
        num_inputs, num_waiting = len(body.prompts), None
        if body.sampling.pooling is not None:
            num_waiting = min(num_inputs, self._window(size // CHARS_PER_TOKEN, num_inputs))
        waiting = size if num_waiting is None else size * num_waiting // num_inputs
        permit = self.admission.reserve(call.caller, places, waiting // CHARS_PER_TOKEN)
        try:
            self._check_tokens(call, body, size, known)
            permit.allowance = call.allowance
            ignored = await self._check_structure(body)
            async with self.with_pictures(call, body) as seen:
                prepared = await self.work(
                    lambda: self._prepare(seen, known), inline=self.is_short(seen, size)
                )
                ignored += await self._check_tools(body, prepared[0].sampling.structured_outputs)
                sizes = [len(prompt.token_ids) for prompt in prepared]
                if num_waiting is not None:
                    num_waiting = self._window(sum(sizes), len(sizes))
                permit.settle(sum(sizes[:num_waiting]))
                if permit.allowance is not None:
                    longest = sum(each.sampling.longest_output for each in prepared) * places // len(prepared)
                    charged = permit.tokens if num_waiting is None else sum(sizes)
                    permit.allowance.charge_tokens(charged, longest)
                if prepared[0].pictures:
                    prepared = [await self._pixels.decoded(prepared[0], self._tenant(call, body), known.info)]
            return _Admitted(permit, prepared, ignored, service_level, quote, self._adapter(body))
        except BaseException:
            permit.release()
            raise

    async def search(self, call: Call, body: ParsedBody) -> Found:
        """Look for an answer by branches of its prompt."""
        assert body.search is not None
        places = body.search.num_parallel
        permit, (prepared, *_), ignored, level, quote, adapter = await self._admit(call, body, places)
        record = record_of(call, body, [prepared], level.service_class)
        record.num_branches = places
        record.adapter = adapter.identity
        record.model = self.model.names[0]
        record.shows_receipt = self.billing.wants_receipt(call)
        try:
            record.charge = self.billing.open(quote, record, body.model)
            self.observer.started(record)
            tree = TreeOverClient(
                self.client,
                self._loaded().reader,
                self.tokenizer,
                prepared,
                body.search,
                record,
                self.observer,
                self._checker.find,
            )
            timeout_s, tenant = self._timeout_s(call), self._tenant(call, body)
            async with tree.opened(tenant, level, timeout_s, body.tree, adapter.number):
                self.recent.note(
                    call.id, call.caller, tree.numbers, level.service_class, prompt=lambda: body.shown_prompt
                )
                return await tree.find(body.sampling.n, ignored, permit.leave_queue)
        finally:
            permit.release(used_tokens=record.num_prompt + record.num_output)
            record.finished_s = time.monotonic()
            record.finish_reason = record.finish_reason or "abort"
            record.charge.give_up(record)
            self.observer.finished(record)

    async def fork(self, call: Call, known: Recent, live: LiveBranch, asked: ForkAsked) -> Generation:
        """Branches of a branch under way, as a generation of their own. The caller closes what it gets."""
        reader = self._loaded().reader
        point = live.fork_point(asked.at)
        append = await self.work(
            lambda: reader.read_inserted(asked.append, "append"), inline=len(asked.append) <= INLINE_CHARS
        )
        sampling, changes = reader.read_changes(live.text.sampling, asked.changes)
        quote = self.billing.quote(
            self.client, call.caller, known.service_class, self.admission.places_taken, None
        )
        permit = self.admission.reserve(call.caller, asked.count, len(append))
        try:
            permit.allowance = call.allowance
            if permit.allowance is not None:
                most = changes.get("max_tokens", live.prepared.sampling.max_tokens)
                permit.allowance.charge_tokens(len(append), asked.count * most)
            stream = self.client.fork(
                live.number,
                asked.count,
                at=point - live.num_taken_over,
                append=append,
                score=asked.score,
                changes=changes,
            )
        except BaseException:
            permit.release()
            raise
        numbers = range(stream.first, stream.first + asked.count)
        start = ForkStart(
            request_id=known.id,
            parent_index=live.index,
            parent=live.text,
            at=point,
            append=append,
            sampling=sampling,
            count=asked.count,
            first_index=self.recent.add_branches(known.id, numbers),
        )
        record = record_of(call, live.body, [live.prepared], known.service_class)
        record.num_prompt += start.num_tokens
        record.num_branches, record.is_stream = asked.count, asked.is_stream
        record.adapter = live.adapter
        record.model = self.model.names[0]
        record.shows_receipt = self.billing.wants_receipt(call)
        try:
            record.charge = self.billing.open(quote, record, live.body.model)
            started = [(live.prepared, stream)]
            generation = Generation(started, self.tokenizer, permit, record, self.observer, fork=start)
        except BaseException:
            record.charge.give_up(record)
            stream.close()
            permit.release()
            raise
        self.live.note(known.id, live.body, live.route, generation)
        return generation

    async def extend(self, live: LiveBranch, given: str | Sequence[int], max_tokens: int | None) -> int:
        """Put text or tokens behind what a branch has; returns how many tokens they are."""
        reader = self._loaded().reader
        name = "text" if isinstance(given, str) else "tokens"
        tokens = await self.work(lambda: reader.read_inserted(given, name), inline=len(given) <= INLINE_CHARS)
        await self.client.extend(live.number, tokens, max_tokens=max_tokens)
        return len(tokens)

    async def extend_placed(
        self, live: LiveBranch, texts: Sequence[InsertedText], max_tokens: int | None
    ) -> int:
        """The same with texts of which those of contexts are placed."""
        reader, body = self._loaded().reader, replace(live.body, blends=True)
        check_blend(body, self.client.info.blending, self.model.names, sees=self.sees(body))
        parts = [(each.text, each.context is not None) for each in texts]
        is_short = sum(len(text) for text, _ in parts) <= INLINE_CHARS
        ids, modules = await self.work(lambda: reader.read_placed(parts, "content"), inline=is_short)
        if not body.cache_salt:
            used = [each.context for each in texts if each.context is not None]
            modules = self.contexts.pin_modules(used, body.model, ids, modules)
        await self.client.extend(live.number, ids, max_tokens=max_tokens, modules=modules)
        return len(ids)

    async def work(self, do: Callable[[], Value], *, inline: bool) -> Value:
        """Run what takes the processor for a while, beside the event loop unless it is short."""
        if inline:
            return do()
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def check_prompt(self, body: ParsedBody) -> int:
        """About how many characters it has. Raises InvalidRequest for what is too much, or nothing for this model."""
        facts, sees = self._loaded().facts, self.model.pictures is not None
        return check_prompt(body, facts.max_model_len, self.settings.limits, sees=sees)

    def sees(self, body: ParsedBody) -> bool:
        """Whether a conversation has pictures for a model that takes them."""
        return self.model.pictures is not None and has_pictures(body.messages or ())

    def is_short(self, body: ParsedBody, size: int) -> bool:
        """Whether a prompt of about `size` characters is read faster than another thread takes over."""
        also = len(body.sampling.prediction)
        return size + also <= INLINE_CHARS and not body.sampling.bad_words and not self.sees(body)

    def with_pictures(self, call: Call, body: ParsedBody) -> AbstractAsyncContextManager[ParsedBody]:
        """The conversation with its pictures at hand, as long as the block is open."""
        if self.model.pictures is None or not self.sees(body):
            return nullcontext(body)
        return self.media_sources.at_hand(call, body, self.model.pictures.limit)

    def prompt_ids(self, body: ParsedBody) -> list[int]:
        """The tokens of a conversation, for callers that only count them."""
        return self._render(body).ids

    def _render(self, body: ParsedBody) -> RenderedChat:
        structure = body.sampling.structured_outputs
        return self._chat.render(body.messages or (), structure=structure, **body.template)

    # -- from a body to the engine -------------------------------------------------------------------------

    def _loaded(self) -> _LoadedModel:
        info, model, settings = self.client.info, self.model, self.settings
        if self._known is None or self._known.info is not info:
            longest = info.max_model_len
            facts = ModelFacts(model.names, longest, model.generation, self.client.adapters)
            reader = PromptReader(
                model.tokenizer, vocab_size=info.vocab_size, max_model_len=longest, seed=model.seed
            )
            inputs = InputReader(model.pooled, reader, longest)
            self._known = _LoadedModel(info=info, facts=facts, reader=reader, inputs=inputs)
            capacity = self.admission.capacity
            capacity.places = info.max_num_seqs + settings.max_queue
            capacity.queued_tokens = settings.max_queued_tokens or max(
                longest, settings.max_queue * longest // 4
            )
        return self._known

    def _window(self, tokens: int, inputs: int) -> int:
        """How many inputs of one call the engine has at a time: they fill its steps, and requests of others wait for
        no more of them than that."""
        info = self._loaded().info
        enough = math.ceil(STEPS_AHEAD * info.max_num_batched_tokens * inputs / max(tokens, 1))
        return min(max(enough, 2), 2 * info.max_num_seqs)

    def _tenant(self, call: Call, body: ParsedBody) -> str:
        tenant = call.caller.tenant
        return f"{tenant}{SALT}{body.cache_salt}" if body.cache_salt else tenant

    def _adapter(self, body: ParsedBody) -> AdapterInfo:
        """The adapter that a request names as its model. Raises UnknownModel if it was unloaded meanwhile."""
        if body.model in self.model.names:
            return NO_INFO
        if body.model not in self.client.adapters:
            raise UnknownModel(f"the model {body.model!r:.128} is not loaded any more", param="model")
        return self.client.adapters[body.model]

    def _timeout_s(self, call: Call) -> float | None:
        """What is left of the time it may take; a line of a batch has the batch's own."""
        timeout_s = None if call.caller.batch_id else self.settings.request_timeout_s
        if timeout_s is None:
            return None
        return max(0.001, timeout_s - (time.monotonic() - call.received_s))

    def _service_level(self, call: Call, body: ParsedBody) -> ServiceLevel:
        """Raises what a key does not allow. A line of a batch is never more urgent than its class."""
        priority = body.priority
        if call.caller.batch_id and priority is not None:
            priority = max(priority, 0)
        return service_level_of(call.caller, body.service_tier, priority)

    def _quote(self, call: Call, body: ParsedBody, service_class: str) -> Quote:
        return self.billing.quote(
            self.client, call.caller, service_class, self.admission.places_taken, body.max_price
        )

    def _check_tokens(self, call: Call, body: ParsedBody, size: int, known: _LoadedModel) -> None:
        """Refuse what its key has no tokens for even if its text makes as few tokens as texts do."""
        if call.allowance is None:
            return
        most, longest = known.facts.max_model_len, body.sampling.longest_output
        least = size // self.settings.limits.prompt_chars_per_token
        guess = size // CHARS_PER_TOKEN
        at_least = least + min(longest, max(0, most - least))
        about = guess + body.num_branches * min(longest, max(0, most - guess))
        call.allowance.check_tokens(at_least, about)

    async def _check_structure(self, body: ParsedBody) -> tuple[str, ...]:
        structure = body.sampling.structured_outputs
        if structure is None:
            return ()
        field = body.structure_field
        # What is not asked for by such a field, this server has written.
        is_own = field not in STRUCTURE_FIELDS
        return await self._checker.check(structure, field or FIELD, control_tokens=is_own)

    async def _check_tools(self, body: ParsedBody, structure: Structure | None) -> tuple[str, ...]:
        """Schemas of tools come from the client; where none is followed, the grammar is all ours."""
        if body.tools is None or structure is None or not body.tools.follows_schemas:
            return ()
        try:
            return await self._checker.check(structure, "tools", control_tokens=True)
        except InvalidRequest as error:
            raise with_tool_named(error, structure, body.tools) from None

    def _prepare(self, body: ParsedBody, known: _LoadedModel) -> list[PreparedRequest]:
        most = known.facts.max_model_len
        if body.messages is not None:
            rendered = self._render(body)
            check_length(len(rendered.ids), most, "messages")
            return [prepared_chat(known.reader, rendered, body.sampling)]
        if body.sampling.pooling is not None:
            return prepare_inputs(body, known.inputs)
        texts = [
            (prompt, self.tokenizer.encode(prompt))
            if isinstance(prompt, str)
            else (None, cast("list[int]", prompt))
            for prompt in body.prompts
        ]
        for _, ids in texts:
            check_length(len(ids), most, "prompt")
        return [known.reader.prepare(text, ids, body.sampling) for text, ids in texts]

    def _pinned(
        self, call: Call, body: ParsedBody, prompt: PreparedRequest
    ) -> tuple[SamplingParams, PromptParts]:
        """How a prompt is computed, with the pins of its contexts that were lost."""
        sampling, parts = prompt.sampling, prompt.parts
        if body.contexts and not body.cache_salt:
            ids, used = prompt.token_ids, (body.contexts, body.model)
            parts = parts._replace(modules=self.contexts.pin_modules(*used, ids, parts.modules))
            if not body.blends and sampling.pin is None:
                sampling = replace(sampling, pin=self.contexts.pin(*used, ids))
        return sampling, parts

    def _submit(
        self,
        call: Call,
        body: ParsedBody,
        prepared: Sequence[PreparedRequest],
        service_level: ServiceLevel,
        adapter: int,
    ) -> list[tuple[PreparedRequest, EngineStream]]:
        tenant = self._tenant(call, body)
        started: list[tuple[PreparedRequest, EngineStream]] = []

        def submit(prompt: PreparedRequest) -> EngineStream:
            sampling, parts = self._pinned(call, body, prompt)
            if call.caller.cache_share < 1.0:
                sampling = replace(sampling, cache_share=call.caller.cache_share)
            return self.client.submit(
                prompt.token_ids,
                sampling,
                tenant=tenant,
                service_level=service_level,
                timeout_s=self._timeout_s(call),
                tree=body.tree,
                adapter=adapter,
                parts=parts._replace(is_module=body.is_module),
            )

        note = partial(
            self.recent.note,
            call.id,
            call.caller,
            service_class=service_level.service_class,
            timeout_s=self._timeout_s(call),
            prompt=lambda: body.shown_prompt,
        )
        if body.sampling.pooling is not None:
            note()
            found = partial(self.recent.found_number, call.id)
            return feed(prepared, submit, found)
        try:
            for prompt in prepared:
                started.append((prompt.lean(), submit(prompt)))
        except BaseException:
            for _, stream in started:
                stream.close()
            raise
        numbers = [stream.first + index for prompt, stream in started for index in range(prompt.sampling.n)]
        note(numbers)
        return started
