"""`LLM`: prompts in, finished outputs out, with the engine in the caller's process and thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

from paceline.core.dial import OFF, DialStatus, chosen_setting
from paceline.core.parameters import CLASSIFY
from paceline.core.request import MAX_TREE_BRANCHES, TreeLimits
from paceline.core.sampling import MAX_HOLD_S, SamplingParams
from paceline.core.service_class import DEFAULT_CLASS, ServiceLevel, class_of
from paceline.errors import InvalidRequest
from paceline.llm.adapters import LoRARequest
from paceline.llm.arguments import check_call
from paceline.llm.frontend import Frontend, ModelHolder
from paceline.llm.offline import Submission, TreeInPlace, run_requests, stream_request
from paceline.llm.outputs import RequestOutput
from paceline.llm.pairs import LONGEST_FIRST, NOT_CUT, Cut, PooledInput, pair_up, plan_pairs
from paceline.llm.prompts import Messages, PreparedRequest, Prompt
from paceline.llm.search import SearchResult, make_search
from paceline.llm.tree import AsyncTree, Inserted, Tree, now
from paceline.llm.vectors import (
    PoolingRequestOutput,
    Ranked,
    pooled_sampling,
    prompted,
    ranked,
    vector_of,
)
from paceline.text.tools.reading import read_openai_tools

# The progress bar of a batch: requests done, tokens per second in and out.


@contextmanager
def progress(total: int) -> Iterator[Callable[[RequestOutput], None]]:
    """Inside, the function that is given shows that a request has finished."""
    from tqdm.auto import tqdm

    num_input, num_output, started_s = 0, 0, time.perf_counter()

    def rates() -> str:
        seconds = max(time.perf_counter() - started_s, 1e-9)
        return (
            f"est. speed input: {num_input / seconds:.2f} toks/s, output: {num_output / seconds:.2f} toks/s"
        )

    with tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=rates()) as bar:

        def show(output: RequestOutput) -> None:
            nonlocal num_input, num_output
            num_input += len(output.prompt_token_ids)
            num_output += sum(len(part.token_ids) for part in output.outputs)
            bar.set_postfix_str(rates(), refresh=False)
            bar.update()

        yield show


Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(ModelHolder):
    """A model and its engine. Not thread-safe; `AsyncLLM` is for callers that come and go.

    `with LLM() as llm:` shuts it down at the end.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(Frontend(model, options, interactive=False))
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Close the logs and let go of the model and its memory. May be called twice."""
        if self._held is not None:
            front, self._held = self._held, None
            front.engine.close()

    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests have left: cached prefixes, and texts that drafts come from."""
        self._front.engine.scheduler.reset_prefix_cache()

    def set_dial(
        self,
        position: float | None = None,
        *,
        itl_p99_ms: float | None = None,
        ttft_p99_ms: float | None = None,
    ) -> DialStatus:
        """Turn between latency (0) and throughput (1), or hold a target; with nothing given the dial is off."""
        setting = chosen_setting(position, itl_p99_ms, ttft_p99_ms) or OFF
        self._front.engine.scheduler.set_dial(setting)
        return self.dial_status()

    def dial_status(self) -> DialStatus:
        return self._front.engine.scheduler.state.dial.status()

    def set_policy(self, name: str, **options: float | str) -> None:
        """Order requests by another policy; `options` are those of the config that policies read."""
        self._front.engine.scheduler.set_policy(name, **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        service_tier: str | None = None,
        lora_request: Adapters = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs come in the order of the prompts. One request failing fails no other.

        `priority` counts within the class of service that `service_tier` names; lower goes first. `lora_request`: the
        adapter to answer with, one for all or one for each; needs `enable_lora=True`.
        """
        check_call(self.generate, unsupported)
        listed = _listed(prompts)
        params = _params(sampling_params, self._front.default_sampling, len(listed))
        prepared = [self._front.read(prompt, own) for prompt, own in zip(listed, params, strict=True)]
        return self._run(
            prepared,
            priority,
            use_tqdm=use_tqdm,
            service_class=class_of(service_tier),
            lora_request=lora_request,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        lora_request: Adapters = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Answer conversations: one, as a list of messages, or a list of them.

        With `tools`, in OpenAI's form, outputs have `tool_calls` and `reasoning` apart from their text. `lora_request`
        as in `generate`.
        """
        check_call(self.chat, unsupported)
        use = read_openai_tools({"tools": tools or (), "tool_choice": tool_choice})
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        params = _params(sampling_params, self._front.chat_sampling, len(conversations))
        prepared = []
        for conversation, own in zip(conversations, params, strict=True):
            request = self._front.read_chat(
                conversation,
                own,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                switches=chat_template_kwargs,
                use=use,
            )
            prepared.append(request)
        return self._run(prepared, None, use_tqdm=use_tqdm, lora_request=lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        **unsupported: Any,
    ) -> list[PoolingRequestOutput]:
        """The vector of each text, in their order: `output.outputs.data`, or `.embedding` as a list.

        `dimensions`: only the first numbers of each; `normalize`: to a length of 1, by default as its files say;
        `prompt_name`: one of the texts that they put before an input; `truncate`: texts that are too long are cut.
        Raises if one of the texts cannot have a vector.
        """
        check_call(self.embed, unsupported)
        defaults = self._front.embedding
        sampling = pooled_sampling(defaults, dimensions=dimensions, normalize=normalize)
        listed = [prompted(prompt, defaults, prompt_name) for prompt in _listed(prompts)]
        cut = Cut(is_cut=truncate)
        return self._pool(listed, sampling, use_tqdm=use_tqdm, cut=cut, lora_request=lora_request)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """How well each label of a classifier fits each text: `output.outputs.probs`."""
        if reason := self._front.pooled.why_no_labels:
            raise InvalidRequest(reason, param="model")
        return self._pool(_listed(prompts), pooled_sampling(None, kind=CLASSIFY), use_tqdm=use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        raw: bool = False,
        truncate: bool = False,
        truncation_strategy: str = LONGEST_FIRST,
        use_tqdm: bool = True,
    ) -> list[float]:
        """How well texts fit together, pair by pair, or one text with each other one.

        A classifier of one label and a model that chooses (Qwen3-Reranker) read both texts at once; of others it is the
        cosine of two vectors. `raw`: without sigmoid or softmax. `truncate`: pairs that are too long are cut, at the
        end of the longer text (`longest_first`) or of the second (`only_second`).
        """
        ones, others = pair_up(text_1, text_2)
        plan = plan_pairs(self._front.pooled, ones, others, raw=raw)
        cut = Cut(is_cut=truncate, strategy=truncation_strategy)
        found = self._pool(plan.inputs, plan.sampling, use_tqdm=use_tqdm, cut=cut, sources=plan.sources)
        return plan.scores([output.outputs.data for output in found])

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[Ranked]:
        """Documents by how well they fit a query, the best first. `options` are those of `score`."""
        if top_n is not None and top_n < 1:
            raise InvalidRequest(f"top_n must be at least 1, not {top_n}", param="top_n")
        return ranked(documents, self.score(query, documents, **options), top_n)

    def _pool(
        self,
        inputs: Sequence[PooledInput],
        sampling: SamplingParams,
        *,
        use_tqdm: bool,
        cut: Cut = NOT_CUT,
        sources: Sequence[int] | None = None,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput]:
        def name(index: int) -> str:
            return f"input {index if sources is None else sources[index]}"

        prepared = self._front.inputs.read(inputs, sampling, name, cut)
        outputs = self._run(prepared, None, use_tqdm=use_tqdm, lora_request=lora_request)
        return [vector_of(output, place) for place, output in enumerate(outputs)]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        service_tier: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt, step by step: each item is the whole output so far. `fork` and `prune` change its
        branches between two items. Leaving the iterator ends the request.
        """
        front, name = self._front, str(next(self._numbers))
        prepared = front.read(prompt, sampling_params or front.default_sampling)
        submission = Submission(
            name=name,
            request=prepared,
            priority=priority,
            service_class=class_of(service_tier),
            adapter=front.adapters.number(lora_request),
        )
        return stream_request(front, submission)

    def tree(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        max_branches: int = MAX_TREE_BRANCHES,
        hold_s: float = MAX_HOLD_S,
        service_tier: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Tree:
        """A prompt, or a conversation, to make branches of. `with llm.tree(...) as tree:` ends what is left.

        `max_rows`: branches that compute at the same time; `max_tokens`: output of all together; `hold_s`: how long a
        branch is kept at its end. `lora_request`: the adapter that all of them are answered with.
        """
        front, name = self._front, str(next(self._numbers))
        prepared = front.read_tree(prompt, sampling_params or front.default_sampling, hold_s)
        limits = TreeLimits(max_rows=max_rows, max_tokens=max_tokens, max_branches=max_branches)
        level = ServiceLevel(class_of(service_tier))
        adapter = front.adapters.number(lora_request)
        output = front.open_tree(
            name, prepared, limits, front.engine.now_s, service_level=level, adapter=adapter
        )
        return Tree(TreeInPlace(front, name, output, prepared.sampling))

    def search(
        self,
        kind: str,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> SearchResult:
        """Search for an answer by branches of a prompt or a conversation.

        `kind` is best_of, self_consistency, beam, tree_of_thought or probe; `options` are the fields of its class in
        `paceline.llm.search`, as `n=8`.
        """
        search = make_search(kind, options)
        params = search.sampling(sampling_params or self._front.default_sampling)
        with self.tree(prompt, params, lora_request=lora_request) as tree:
            assert isinstance(tree.backend, TreeInPlace)
            tree.backend.is_lockstep |= search.is_lockstep
            return now(search.run(AsyncTree(tree.backend)))

    def fork(
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
        """Branch an output of a request that is streamed, behind its first `at` tokens (all it has) and `append`.

        The new outputs share its KV and begin with its text; `changes` are parameters of sampling. Returns their
        indexes in `RequestOutput.outputs`. Raises UnknownRequest if it has ended, TreeFull.
        """
        return self._front.fork(request_id, branch, count, at=at, append=append, score=score, changes=changes)

    def extend(self, request_id: str, branch: int, given: Inserted, *, max_tokens: int | None = None) -> None:
        """Put text or tokens behind an output of a request that is streamed; it goes on, for `max_tokens` more."""
        self._front.extend(request_id, branch, given, max_tokens=max_tokens)

    def prune(self, request_id: str, branch: int) -> None:
        """End one output of a request that is streamed, with finish_reason abort; the others continue."""
        self._front.prune(request_id, branch)

    def _run(
        self,
        prepared: Sequence[PreparedRequest],
        priority: Sequence[int] | None,
        *,
        use_tqdm: bool,
        service_class: str = DEFAULT_CLASS,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        if priority is not None and len(priority) != len(prepared):
            raise ValueError(f"{len(prepared)} prompts and {len(priority)} priorities: give one for each")
        if any(request.sampling.on_stop == "hold" for request in prepared):
            raise InvalidRequest(
                "a held answer waits for what comes next: use LLM.tree or LLM.stream", param="on_stop"
            )
        chosen = lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(prepared)
        if len(chosen) != len(prepared):
            raise ValueError(f"{len(prepared)} prompts and {len(chosen)} adapters: give one, or one for each")
        adapters = [self._front.adapters.number(each) for each in chosen]
        submissions = [
            Submission(
                name=str(next(self._numbers)),
                request=request,
                priority=own,
                service_class=service_class,
                adapter=adapter,
            )
            for request, own, adapter in zip(prepared, priority or [0] * len(prepared), adapters, strict=True)
        ]
        max_open = max(1, self.loaded.config.scheduler.max_queue // 2)
        done: dict[str, RequestOutput] = {}
        shown = progress(len(prepared)) if use_tqdm else nullcontext(lambda output: None)
        running = run_requests(self._front, submissions, max_open=max_open)
        with shown as show, closing(running):
            for output in running:
                done[output.request_id] = output
                show(output)
        return [done[submission.name] for submission in submissions]


def _params(given: Params, default: SamplingParams, count: int) -> list[SamplingParams]:
    given = default if given is None else given
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{count} prompts and {len(given)} sampling parameters: give one, or one for each")
    return list(given)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts as a list: text, a mapping and a list of token ids are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
