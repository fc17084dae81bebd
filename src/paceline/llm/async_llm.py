"""`AsyncLLM`: requests that come, stream and go, with the engine in a separate thread.

`generate` is an async iterator, and the lifetime of the request is the iterator's: leaving it in any way aborts the
request and frees its blocks. Outputs are handed over once per step; a slow reader finds the newest state, not a queue.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline.core.dial import OFF, DialStatus, chosen_setting
from paceline.core.events import StepEvents
from paceline.core.request import DEFAULT_TENANT, MAX_TREE_BRANCHES, Change, ChangeOutcome, TreeLimits
from paceline.core.sampling import MAX_HOLD_S, RequestOutputKind, SamplingParams
from paceline.core.service_class import ServiceLevel, class_of
from paceline.engine.changes import apply_change
from paceline.engine.engine import Engine
from paceline.engine.stepper import Stepper
from paceline.errors import EngineFailed, InvalidRequest, InvalidTransition, UnknownRequest
from paceline.llm.adapters import LoRARequest
from paceline.llm.arguments import check_call
from paceline.llm.frontend import Frontend, ModelHolder
from paceline.llm.outputs import OutputDelta, RequestOutput
from paceline.llm.pairs import Cut
from paceline.llm.prompts import Messages, PreparedRequest, Prompt
from paceline.llm.search import SearchResult, make_search
from paceline.llm.tree import AsyncTree, FindPattern, Inserted, TellingBackend
from paceline.llm.vectors import PoolingRequestOutput, pooled_sampling, prompted, vector_of
from paceline.text.tools.reading import read_openai_tools

# The engine's own thread: takes commands, steps while there is work, sleeps while there is none.
#
# Commands are functions that run between two steps, in order; everything that touches the engine goes through them.
# A failure of the engine reaches every waiting caller, and every later command.


Command = Callable[[], object]


class EngineLoop:
    """Runs one engine in a thread."""

    def __init__(
        self, engine: Engine, on_events: Callable[[StepEvents], None], on_failure: Callable[[Exception], None]
    ) -> None:
        self._stepper = Stepper(engine, on_events)
        self._on_failure = on_failure
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    def do(self, command: Command) -> None:
        """Have the engine's thread run a command before its next step."""
        with self._wake:
            if self.failure is not None or self._stopping:
                raise EngineFailed("the engine has stopped") from self.failure
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread; what is under way is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def _run(self) -> None:
        try:
            while self._wait():
                self._do_all()
                self._stepper.step()
        except Exception as error:
            with self._wake:
                self.failure = error
            self._stepper.deliver_rest()
            self._on_failure(error)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the thread should end."""
        with self._wake:
            while not (self._commands or self._stopping):
                nap_s = self._stepper.wait_s()
                if nap_s == 0:
                    break
                self._wake.wait(nap_s)
                self._stepper.wake()
            return not self._stopping

    def _do_all(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()


Value = TypeVar("Value")


@dataclass(slots=True, eq=False)
class Reader:
    """Where the outputs of one request go."""

    loop: asyncio.AbstractEventLoop
    ready: asyncio.Event
    output: RequestOutput | None = None
    error: Exception | None = None

    def take(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        """Called in the reader's event loop."""
        self.output = self.output if output is None else output
        self.error = self.error or error
        self.ready.set()

    def fail(self, error: Exception) -> None:
        """Called by the engine's thread."""
        _call(self.loop, lambda: self.take(None, error))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the event loop is closed: there is no reader
        loop.call_soon_threadsafe(function)


class TreeInThread(TellingBackend):
    """The backend of a tree: commands go to the engine's thread, which sends a new state after each."""

    def __init__(
        self, llm: AsyncLLM, name: str, reader: Reader, whole: RequestOutput, sampling: SamplingParams
    ) -> None:
        super().__init__()
        self._llm, self._name, self._reader = llm, name, reader
        self.tokenizer, self.sampling = llm.get_tokenizer(), sampling
        self.find_pattern: FindPattern | None = None
        self._whole = whole  # the engine's thread's own
        if reader.output is None:
            reader.output = whole.copied()

    @property
    def output(self) -> RequestOutput:
        assert self._reader.output is not None
        return self._reader.output

    async def changed(self) -> None:
        reader = self._reader
        await reader.ready.wait()
        reader.ready.clear()
        if reader.error is not None:
            raise reader.error

    async def close(self) -> None:
        if self._llm.is_running:
            with suppress(EngineFailed):
                await self._do("end_tree", (), {})

    async def _do(self, what: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        front, reader = self._llm._front, self._reader

        def do() -> Any:
            try:
                return getattr(front, what)(self._name, *args, **options)
            finally:
                self._llm._on_events(front.engine.scheduler.take_events())
                state = self._whole.copied()
                _call(reader.loop, lambda: reader.take(state))

        return await self._llm._in_engine(do)


class AsyncLLM(ModelHolder):
    """A model behind an async interface. `async with AsyncLLM() as llm:` shuts it down at the end."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(Frontend(model, options, interactive=True))
        self._engine = self._front.engine
        self._collector = self._front.collector
        self._readers: dict[str, Reader] = {}  # by the names callers gave
        self._listeners: dict[int, Reader] = {}  # by the output of the collector; the engine's thread's own
        gc.collect()
        gc.freeze()  # what loading made stays: no collection need look at it again while streams wait
        self._loop = EngineLoop(self._engine, self._on_events, self._on_failure)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)  # a step under way is waited for, other tasks go on

    @property
    def is_running(self) -> bool:
        return self._loop.is_running

    def count_chat_tokens(self, messages: Messages) -> int:
        """How long the prompt of a conversation is."""
        return self._front.count_chat(messages)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "default",
        service_tier: str | None = None,
        lora_request: LoRARequest | None = None,
        **unsupported: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a completion: each item is the whole output so far, or what `sampling_params.output_kind` says.

        `priority` counts within the class of service that `service_tier` names; lower goes first. `lora_request`: the
        adapter to answer with; needs `enable_lora=True`.
        """
        check_call(self.generate, unsupported)
        params = sampling_params or self._front.default_sampling
        service_level = ServiceLevel(class_of(service_tier), priority)
        return self._stream(
            lambda: self._front.read(prompt, params), request_id, tenant, service_level, lora_request
        )

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "default",
        service_tier: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        lora_request: LoRARequest | None = None,
        **unsupported: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream an answer to a conversation; `tools` and `lora_request` as in `LLM.chat`."""
        check_call(self.chat, unsupported)
        use = read_openai_tools({"tools": tools or (), "tool_choice": tool_choice})
        params = sampling_params or self._front.chat_sampling

        def read() -> PreparedRequest:
            return self._front.read_chat(messages, params, switches=chat_template_kwargs, use=use)

        service_level = ServiceLevel(class_of(service_tier), priority)
        return self._stream(read, request_id, tenant, service_level, lora_request)

    async def embed(
        self,
        prompt: Prompt,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        tenant: str = "default",
        service_tier: str | None = None,
    ) -> PoolingRequestOutput:
        """The vector of a text; options as in `LLM.embed`."""
        defaults = self._front.embedding
        sampling = pooled_sampling(defaults, dimensions=dimensions, normalize=normalize)
        given = prompted(prompt, defaults, prompt_name)

        def read() -> PreparedRequest:
            (prepared,) = self._front.inputs.read(
                [given], sampling, lambda index: "prompt", Cut(is_cut=truncate)
            )
            return prepared

        outputs = self._stream(read, None, tenant, ServiceLevel(class_of(service_tier)), None)
        (output,) = [output async for output in outputs if output.finished]
        return vector_of(output, 0)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output with finish_reason abort. An unknown one is left alone."""
        self._loop.do(lambda: self._abort(request_id))

    @asynccontextmanager
    async def tree(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        max_branches: int = MAX_TREE_BRANCHES,
        hold_s: float = MAX_HOLD_S,
        tenant: str = DEFAULT_TENANT,
        service_tier: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[AsyncTree]:
        """A prompt, or a conversation, to make branches of. `async with llm.tree(...) as tree:` ends what is left.

        `max_rows`: branches that compute at the same time; `max_tokens`: output of all together; `hold_s`: how long a
        branch is kept at its end. `lora_request`: the adapter that all of them are answered with.
        """
        front, arrival_s = self._front, self._engine.now_s
        params = sampling_params or front.default_sampling
        limits = TreeLimits(max_rows=max_rows, max_tokens=max_tokens, max_branches=max_branches)
        level = ServiceLevel(class_of(service_tier))
        prepared = await asyncio.to_thread(front.read_tree, prompt, params, hold_s)
        name, reader = f"tree-{id(prepared):x}", Reader(asyncio.get_running_loop(), asyncio.Event())

        def add() -> RequestOutput:
            adapter = front.adapters.number(lora_request)
            output = front.open_tree(
                name, prepared, limits, arrival_s, service_level=level, tenant=tenant, adapter=adapter
            )
            self._listeners[id(output)] = reader
            return output

        self._readers[name] = reader
        try:
            whole = await self._in_engine(add)
            async with AsyncTree(TreeInThread(self, name, reader, whole, prepared.sampling)) as tree:
                yield tree
        finally:
            del self._readers[name]

    async def search(
        self,
        kind: str,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> SearchResult:
        """Search for an answer by branches; kinds and options as in `LLM.search`."""
        search = make_search(kind, options)
        params = search.sampling(sampling_params or self._front.default_sampling)
        async with self.tree(prompt, params, lora_request=lora_request) as tree:
            return await search.run(tree)

    async def fork(
        self,
        request_id: str,
        branch: int = 0,
        count: int = 1,
        *,
        at: int | None = None,
        append: Inserted = "",
        score: float = 0.0,
        **changes: Any,
    ) -> list[int]:
        """Branch an output of a request under way, behind its first `at` tokens (all it has) and `append`.

        The new outputs share its KV and begin with its text; `changes` are parameters of sampling. Returns their
        indexes in `RequestOutput.outputs`. Raises UnknownRequest if it has ended, TreeFull.
        """
        fork = partial(
            self._front.fork, request_id, branch, count, at=at, append=append, score=score, changes=changes
        )
        return await self._in_engine(fork)

    async def extend(
        self, request_id: str, branch: int, given: Inserted, *, max_tokens: int | None = None
    ) -> None:
        """Put text or tokens behind an output of a request under way; it goes on, for `max_tokens` more."""
        await self._in_engine(partial(self._front.extend, request_id, branch, given, max_tokens=max_tokens))

    async def prune(self, request_id: str, branch: int) -> None:
        """End one output of a request under way, with finish_reason abort; the others continue."""
        await self._in_engine(lambda: self._front.prune(request_id, branch))

    async def set_dial(
        self,
        position: float | None = None,
        *,
        itl_p99_ms: float | None = None,
        ttft_p99_ms: float | None = None,
    ) -> DialStatus:
        """Turn between latency (0) and throughput (1), or hold a target; with nothing given the dial is off."""
        setting = chosen_setting(position, itl_p99_ms, ttft_p99_ms) or OFF
        scheduler = self._engine.scheduler

        def turn() -> DialStatus:
            scheduler.set_dial(setting)
            return scheduler.state.dial.status()

        return await self._in_engine(turn)

    async def dial_status(self) -> DialStatus:
        return await self._in_engine(self._engine.scheduler.state.dial.status)

    async def set_policy(self, name: str, **options: float | str) -> None:
        """Order requests by another policy; `options` are those of the config that policies read."""
        await self._in_engine(lambda: self._engine.scheduler.set_policy(name, **options))

    async def change(
        self,
        request_id: str,
        *,
        priority: int | None = None,
        timeout_s: float | None = None,
        paused: bool | None = None,
    ) -> None:
        """Change a request under way: its priority within its class, how many seconds it may take from now on
        (infinity for any), whether it is paused. A paused request gives its place and memory back, and its iterator
        waits. Raises UnknownRequest for one that has ended, InvalidTransition for one that cannot be paused now.
        """
        await self._in_engine(lambda: self._change(request_id, priority, timeout_s, paused))

    def shutdown(self) -> None:
        """Stop the engine; requests under way end with an error. May be called twice."""
        if self._held is None:
            return
        self._loop.stop()
        with suppress(Exception):  # readers get the error below; only the rest of a log can fail here
            self._engine.close()
        self._held = None
        self._on_failure(EngineFailed("the engine was shut down"))
        gc.unfreeze()

    async def _in_engine(self, function: Callable[[], Value]) -> Value:
        """Have the engine's thread call something between two steps."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Value] = loop.create_future()

        def resolve(result: Callable[[], None]) -> None:
            _call(loop, lambda: None if done.done() else result())

        def run() -> None:
            try:
                value = function()
            except Exception as error:  # the caller's business alone
                resolve(partial(done.set_exception, error))
            else:
                resolve(partial(done.set_result, value))

        self._loop.do(run)
        return await done

    async def _stream(
        self,
        read: Callable[[], PreparedRequest],
        request_id: str | None,
        tenant: str,
        service_level: ServiceLevel,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        arrival_s = self._engine.now_s  # the engine's thread learns of it between two steps
        prepared = await asyncio.to_thread(read)
        name = request_id if request_id is not None else f"request-{id(prepared):x}"
        if name in self._readers:
            raise InvalidRequest(f"request id {name!r} is in use", param="request_id")
        reader = Reader(asyncio.get_running_loop(), asyncio.Event())
        self._readers[name] = reader
        kind = prepared.sampling.output_kind
        delta = OutputDelta()
        try:
            self._loop.do(
                lambda: self._add(name, reader, prepared, tenant, service_level, arrival_s, lora_request)
            )
            while True:
                await reader.ready.wait()
                reader.ready.clear()
                if reader.error is not None:
                    raise reader.error
                output = reader.output  # may be replaced by a newer one while the caller works on this one
                assert output is not None
                if kind is RequestOutputKind.DELTA:
                    yield delta.since_last(output)
                elif kind is RequestOutputKind.CUMULATIVE or output.finished:
                    yield output
                if output.finished:
                    return
        finally:
            del self._readers[name]
            if (reader.output is None or not reader.output.finished) and self._loop.is_running:
                self._loop.do(lambda: self._abort(name))

    # -- in the engine's thread ----------------------------------------------------------------------------

    def _add(
        self,
        name: str,
        reader: Reader,
        prepared: PreparedRequest,
        tenant: str,
        service_level: ServiceLevel,
        arrival_s: float,
        lora_request: LoRARequest | None,
    ) -> None:
        tokens, sampling = prepared.token_ids, prepared.sampling
        try:
            ids = self._engine.add(
                tokens,
                sampling,
                service_level=service_level,
                tenant=tenant,
                arrival_s=arrival_s,
                adapter=self._front.adapters.number(lora_request),
                media=prepared.media,
            )
        except Exception as error:  # refused: the caller's business alone
            reader.fail(error)
            return
        output = self._collector.open(name, prepared, ids, arrival_s)
        self._listeners[id(output)] = reader

    def _abort(self, name: str) -> None:
        for request_id in self._collector.ids_of(name):
            self._engine.abort(request_id)

    def _change(self, name: str, priority: int | None, timeout_s: float | None, paused: bool | None) -> None:
        until_s = None if timeout_s is None else self._engine.now_s + timeout_s
        change = Change(priority=priority, until_s=until_s, paused=paused)
        ids = self._collector.ids_of(name)
        outcomes = [apply_change(self._engine, request_id, change) for request_id in ids]
        if ChangeOutcome.BUSY in outcomes:
            raise InvalidTransition(f"request {name} cannot be paused at this moment; try again")
        if ChangeOutcome.CHANGED not in outcomes:
            raise UnknownRequest(f"no request under way has the id {name}")

    def _on_events(self, events: StepEvents) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Reader, RequestOutput]]] = {}
        for output in self._collector.take(events):
            # By the output, not by its name, which a caller may use again once its request is over.
            reader = self._listeners.pop(id(output)) if output.finished else self._listeners[id(output)]
            # A copy of one that the engine's thread goes on writing to.
            by_loop.setdefault(reader.loop, []).append(
                (reader, output if output.finished else output.copied())
            )
        for loop, outputs in by_loop.items():  # all at once: waking a loop costs more than an output
            _call(loop, partial(_hand_out, outputs))

    def _on_failure(self, error: Exception) -> None:
        for reader in list(self._readers.values()):
            reader.fail(error)


def _hand_out(outputs: list[tuple[Reader, RequestOutput]]) -> None:
    for reader, output in outputs:
        reader.take(output)
