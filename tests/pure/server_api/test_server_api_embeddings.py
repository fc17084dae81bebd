"""/v1/embeddings over an engine that says what a test wrote down: salts, prompts, and the time a call may take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from paceline.models.files.pooling_config import EmbeddingDefaults
from paceline.process.client import BranchUpdate
from tests.pure.server_api.api_helpers import INFO, Api, Script, ending

ROUTE = "/v1/embeddings"
WIDTH = 4
WINDOW = 2 * INFO.max_num_seqs


def vector(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
    """One that holds the number of tokens."""
    found = np.full(WIDTH, len(prompt), "<f4").tobytes()
    return [[BranchUpdate(branch=0, ending=ending(num_output=0)._replace(vector=found), time_s=1.0)]]


def make(script: Script = vector, **settings: Any) -> Api:
    defaults = EmbeddingDefaults(
        kind="last", width=WIDTH, prompts={"query": "find: "}, default_prompt="query"
    )
    return Api(script, embedding=defaults, **settings)


def test_a_salt_keeps_cached_prompts_apart() -> None:
    api = make()
    for salt in ({}, {"cache_salt": "mine"}, {"cache_salt": "yours"}):
        api.ask(ROUTE, {"input": "hello", **salt})
    assert len({submitted["tenant"] for submitted in api.client.submitted}) == 3
    assert api.is_at_rest


def test_a_prompt_is_put_before_texts_and_never_before_token_ids() -> None:
    api = make()
    api.ask(ROUTE, {"input": [5, 6]})
    assert api.client.submitted[0]["tokens"] == [5, 6]
    with pytest.raises(InvalidRequest, match="prompt_name: an input of token ids is taken as it is"):
        api.ask(ROUTE, {"input": [5, 6], "prompt_name": "query"})
    assert len(api.client.submitted) == 1 and api.is_at_rest


def test_the_time_a_call_may_take_is_that_of_all_its_inputs() -> None:
    """What is handed over late has only what is left."""

    def slow(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
        time.sleep(0.01)
        return vector(prompt, sampling)

    api = make(slow, request_timeout_s=100.0)
    count = 2 * WINDOW
    answer = api.ask(ROUTE, {"input": ["hello"] * count})
    left = [submitted["timeout_s"] for submitted in api.client.submitted]
    assert len(answer["data"]) == len(left) == count
    assert left == sorted(left, reverse=True) and left[0] - left[-1] >= 0.01 * (count - 1)
    assert api.is_at_rest


def test_only_a_window_of_the_inputs_is_with_the_engine() -> None:
    """The others are handed over as these end; a client that leaves takes them along."""
    silent: list[list[BranchUpdate] | Exception] = []
    ended = 3

    def script(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
        return vector(prompt, sampling) if len(api.client.submitted) <= ended else silent

    api = make(script)

    async def run() -> None:
        waiting = asyncio.ensure_future(api.open(ROUTE, {"input": ["hello"] * 5 * WINDOW}))
        for _ in range(20 * WINDOW):
            await asyncio.sleep(0)
        assert len(api.client.submitted) == WINDOW + ended
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(run())
    assert api.is_at_rest and len(api.client.submitted) == WINDOW + ended
