"""K1, K2, K4, K5: a pool of eight blocks, computations that start over at any step, a prefix cache that errs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.faults.live import (
    ALWAYS,
    COMPLETIONS,
    LiveServer,
    error_of,
    flags_of,
    said,
)

BLOCK, BLOCKS = 16, 8
CONTEXT = BLOCK * BLOCKS
HOOKS = {
    "forward": "paceline.runner.native.step:NativeStep.forward",
    "turn": "paceline.process.engine_service:EngineService._turn",
    "keys": "paceline.kv.prefix:KeyMaker.extend",
}
FLAGS = flags_of(
    num_gpu_blocks_override=BLOCKS + 1,  # one is the null block
    block_size=BLOCK,
    max_model_len=CONTEXT,
    max_num_seqs=8,
    max_waiting_requests=40,
)


def body(prompt: str, max_tokens: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    given = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return COMPLETIONS, {**given, **fields}


def test_k1_thirty_two_requests_share_eight_blocks(server: LiveServer) -> None:
    bodies = [body(f"prompt number {number % 4}", 40, stream=number % 8 < 4) for number in range(32)]
    alone = [said(server.post(*each)) for each in bodies[:8]]
    before = server.metrics()["num_preemptions_total"]
    replies = server.all_at_once(bodies)
    assert [said(reply) for reply in replies] == alone * 4
    server.wait_until(lambda: server.metrics()["num_preemptions_total"] > before)
    ended = [line for line in server.log_lines() if line["message"] == f"POST {COMPLETIONS}"][-32:]
    assert max(line["preemptions"] or 0 for line in ended) <= 4


def test_k2_what_never_fits_is_refused_and_what_fits_alone_waits(server: LiveServer) -> None:
    prompt = "p" * (CONTEXT - 20)
    for length in (CONTEXT, CONTEXT + BLOCK):
        error = error_of(server.post(*body("p" * length, 1)))
        assert error is not None and error["code"] == "context_length_exceeded"
    whole = said(server.post(*body(prompt, 20)))
    assert whole[0]["finish_reason"] == "length"
    assert said(server.post(*body(prompt, 100))) == whole  # an answer ends where the context does
    almost = body("q" * (CONTEXT - BLOCK - 20), 20)
    alone = [said(server.post(*each)) for each in (almost, body("small", 30))]
    replies = server.all_at_once([body("small", 30)] * 4 + [almost] * 2 + [body(prompt, 20)])
    assert [said(reply) for reply in replies] == [alone[1]] * 4 + [alone[0]] * 2 + [whole]


def test_k4_a_request_that_starts_over_at_any_step_says_the_same(server: LiveServer) -> None:
    bodies = [body("one that is long enough for a block", 8), body("another", 8, seed=5, temperature=0.9)]
    alone = [said(server.post(*each)) for each in bodies]
    failed = server.metrics()["engine_failed_steps_total"]
    for step in range(1, 9):
        server.fault("forward", "raise", first=step)
        assert [said(reply) for reply in server.all_at_once(bodies)] == alone
        assert server.struck("forward")
        server.heal()
    server.wait_until(lambda: server.metrics()["engine_failed_steps_total"] == failed + 8)


@pytest.mark.parametrize("hook, kind", [("turn", "forget"), ("keys", "same_hash")])
def test_k5_a_prefix_cache_that_forgets_or_confuses_changes_no_answer(
    server: LiveServer, hook: str, kind: str
) -> None:
    # Beginnings that are shared, blocks that are equal at other places, and prompts that only end alike.
    first, second = "a" * BLOCK, "b" * BLOCK
    prompts = [first + second + "!", second + first + "!", first + first + "!", second + second + "!", first]
    bodies = [body(prompt, 6) for prompt in prompts]
    alone = [said(server.post(*each, "x-nothing: 1")) for each in bodies]
    server.fault(hook, kind, last=ALWAYS)
    salted = [(path, {**fields, "cache_salt": kind}) for path, fields in bodies]
    for _ in range(3):
        assert [said(reply) for reply in server.all_at_once(salted)] == alone
        assert [said(server.post(*each)) for each in salted] == alone
    assert server.struck(hook)
