"""E4: whatever is done for one request may raise, and only that request fails; its neighbours say what they always say.

The first and the third call of each such function raise while six requests of different kinds are under way, in either
process. Where only requests with some feature pass a function, it also raises every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults.live import (
    ALWAYS,
    CHAT,
    COMPLETIONS,
    LiveServer,
    error_of,
    flags_of,
    live_server,
    said,
    unharmed,
)

HTTP_HOOKS = {
    "read body": "paceline.server.http.asgi:read_object",
    "validate": "paceline.server.api.openai_requests:BodyParser.parse",
    "template": "paceline.text.chat_template:ChatTemplate.render",
    "tokenize": "paceline.text.tokenizer:Tokenizer._encode",
    "complete sampling": "paceline.llm.prompts:PromptReader.prepare",
    "reserve": "paceline.server.generate.request_admission:RequestAdmission.reserve",
    "submit": "paceline.process.async_engine:AsyncEngine.submit",
    "open text": "paceline.text.stream:TextStream.__init__",
    "stream push": "paceline.process.streams:StreamBranch.touch",
    "stream take": "paceline.process.streams:StreamBranch.take",
    "stream deliver": "paceline.process.streams:Stream.deliver",
    "detokenize": "paceline.text.stream:Detokenizer.push",
    "stop": "paceline.text.stream:StopMatcher.push",
    "logprobs text": "paceline.llm.branch_text:logprob_entry",
    "frame": "paceline.server.api.openai_routes:ChunkWriter.write",
    "write": "paceline.server.http.protocol:GuardedProtocol.write_chunk",
    "metrics started": "paceline.server.metrics.request_metrics:RequestFamilies.started",
    "log started": "paceline.server.request_log:RequestLog.started",
    "metrics finished": "paceline.server.metrics.request_metrics:_values_of",
}
ENGINE_HOOKS = {
    "engine validate": "paceline.process.model_service:ModelService._tokens",
    "engine sampling": "paceline.process.frames:Sampling.params",
    "engine add": "paceline.scheduler.scheduler:Scheduler.add",
    "keys": "paceline.engine.prefix_keys:PrefixKeyHooks.new_keys",
    "admit": "paceline.engine.prefix_keys:PrefixKeyHooks.admit",
    "adopt blocks": "paceline.kv.manager:KVManager.adopt",
    "allocate blocks": "paceline.kv.manager:KVManager.extend",
    "publish": "paceline.kv.manager:KVManager.publish",
    "build row": "paceline.runner.sampling.sampler:Sampler.join",
    "rules": "paceline.runner.sampling.processors:LogitRules.__init__",
    "logits": "paceline.runner.sampling.processors:LogitRules.apply",
    "note token": "paceline.runner.sampling.processors:LogitRules.note",
    "logprobs": "paceline.runner.sampling.sampler:token_logprobs",
    "prompt logprobs": "paceline.runner.cpu:prompt_logprobs",
    "finish": "paceline.engine.prefix_keys:PrefixKeyHooks.finish",
}
# Computed for all rows at once: a step that fails is computed again, and no request fails.
STEP_HOOKS = {
    "forward": "paceline.runner.native.step:NativeStep.forward",
    "sample": "paceline.runner.sampling.sampler:Sampler.sample",
    "draw": "paceline.runner.sampling.sampler:draw",
}
# Inside a plan for many: every request is answered, and the engine is replaced.
PLAN_HOOKS = {
    "allocate blocks for all": "paceline.kv.manager:KVManager.extend_each",
}
# What is told of a request that has ended already cannot fail it.
HARMLESS = {"finish", "metrics finished"}
COMMON: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "temperature": 0}


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], **COMMON, **fields}


def completion(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": text, **COMMON, **fields}


# Each feature is used by several, in streams and whole answers; every prompt fills blocks.
NEIGHBOURS = [
    chat("first one with a stop", stop=["never said", "nor this"], stream=True),
    chat("second with logprobs", logprobs=True, top_logprobs=2, frequency_penalty=0.5),
    chat("third with both of it", logprobs=True, stop=["never said"], stream=True, seed=1, temperature=0.8),
    completion("fourth: a plain one of some length", prompt_logprobs=1, logit_bias={"20": 1.5}),
    completion("fifth: in two branches", n=2, seed=3, temperature=1.0, stream=True, presence_penalty=0.4),
    completion("sixth: words to avoid", logprobs=1, prompt_logprobs=1, stop="never", frequency_penalty=0.2),
]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    sizes = {"num_gpu_blocks_override": 96, "max_num_seqs": 8, "max_waiting_requests": 1}
    # Prompts take several steps; engines that are replaced are replaced at once, however many there were.
    flags = flags_of(**sizes, max_num_batched_tokens=24, max_restarts=20, restart_backoff_s=0.0)
    hooks = {**HTTP_HOOKS, **ENGINE_HOOKS, **STEP_HOOKS, **PLAN_HOOKS}
    with live_server(model, tmp_path_factory.mktemp("server") / "w", *flags, hooks=hooks) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: LiveServer) -> list[Any]:
    """The answers when nothing fails, each request alone."""
    replies = [server.post(*body) for body in NEIGHBOURS]
    assert not [error for error in map(error_of, replies) if error is not None]
    return [said(reply) for reply in replies]


def strike(server: LiveServer, expected: list[Any], hook: str, first: int, last: int) -> list[dict[str, Any]]:
    """Six requests at once with a fault; returns the errors of those that failed. The others are as ever."""
    errors = []
    with unharmed(server):
        engine = server.engine
        server.fault(hook, "raise", first=first, last=last)
        replies = server.all_at_once(NEIGHBOURS)
        assert server.struck(hook), "the fault was never met"
        for reply, answer in zip(replies, expected, strict=True):
            error = error_of(reply)
            if error is None:
                assert said(reply) == answer
            else:
                errors.append(error)
                assert "secret" not in str(error)
        if hook not in PLAN_HOOKS:
            assert server.engine == engine, "the engine was replaced"
    return errors


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("hook", [*HTTP_HOOKS, *ENGINE_HOOKS])
def test_e4_one_request_fails_alone(server: LiveServer, expected: list[Any], hook: str, call: int) -> None:
    errors = strike(server, expected, hook, call, call)
    assert [error["code"] for error in errors if error["code"] != "numerical_error"] in (
        ["internal_error"],
        [],
    )
    assert len(errors) == (0 if hook in HARMLESS else 1)


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("hook", STEP_HOOKS)
def test_e4_a_step_that_fails_once_fails_no_request(
    server: LiveServer, expected: list[Any], hook: str, call: int
) -> None:
    assert strike(server, expected, hook, call, call) == []


@pytest.mark.parametrize("hook", PLAN_HOOKS)
def test_e4_a_plan_that_fails_is_reported_to_every_request(
    server: LiveServer, expected: list[Any], hook: str
) -> None:
    # How often blocks are given to many depends on which request came when.
    errors = strike(server, expected, hook, 1, 1)
    # A request a moment later finds the next engine loading.
    assert {error["code"] for error in errors} <= {"engine_unavailable", "internal_error", "starting"}


FEATURES: dict[str, dict[str, Any]] = {
    "rules": {"frequency_penalty": 0.5},
    "logits": {"frequency_penalty": 0.5},
    "note token": {"frequency_penalty": 0.5},
    "logprobs": {"logprobs": 1},
    "logprobs text": {"logprobs": 1},
    "prompt logprobs": {"prompt_logprobs": 1},
    "stop": {"stop": "never said"},
    "frame": {"stream": True},
}


@pytest.mark.parametrize("hook", FEATURES)
def test_e4_a_feature_that_always_raises_costs_only_requests_that_use_it(
    server: LiveServer, hook: str
) -> None:
    plain = [completion(f"a neighbour, number {number}") for number in range(4)]
    alone = [said(server.post(*body)) for body in plain]
    with unharmed(server):
        server.fault(hook, "raise", last=ALWAYS)
        for _ in range(2):  # twice: a step that fails is only tried again once
            replies = server.all_at_once([*plain, completion("the victim", **FEATURES[hook])])
            assert [said(reply) for reply in replies[:-1]] == alone
            error = error_of(replies[-1])
            assert error is not None and error["code"] in ("internal_error", "numerical_error")
        assert server.struck(hook) >= 2
