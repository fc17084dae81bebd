"""A workload sent to a server as it is: the record has its requests, in its order, with their times."""

from __future__ import annotations

from urllib.parse import urlsplit

import numpy as np

from paceline.lab.bench.load.figures import TokenSource, send_workload
from paceline.lab.bench.load.pool import Target
from paceline.lab.bench.load.prompt_source import COMPLETIONS, PATHS
from tests.mock_openai import running_mock
from tests.pure.lab.sim.sim_helpers import make_workload


def test_a_workload_is_sent_as_it_is() -> None:
    workload = make_workload([0.0, 0.05, 0.1], prompt=[3, 5, 4], output=[2, 6, 4])
    with running_mock(ttft_ms=5, gap_ms=1) as mock:
        address = urlsplit(mock.url)
        assert address.hostname is not None and address.port is not None
        target = Target(host=address.hostname, port=address.port, path=PATHS[COMPLETIONS])
        record = send_workload(target, "mock", workload, seed=3, label="seen")
    assert record.output_len.tolist() == [2, 6, 4] and record.prompt_len.tolist() == [3, 5, 4]
    assert record.outcome.tolist() == [0, 0, 0]
    assert np.allclose(record.arrival_s, workload.arrival_s)
    assert (record.first_token_s > record.arrival_s).all() and (
        record.finished_s >= record.first_token_s
    ).all()


def test_prompts_have_their_lengths_and_share_no_beginning() -> None:
    workload = make_workload([0.0] * 40, prompt=16, output=1)
    source = TokenSource(workload, seed=1)
    prompts = [source.make(index).fields["prompt"] for index in range(40)]
    assert {len(prompt) for prompt in prompts} == {16}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 40
    assert prompts == [source.make(index).fields["prompt"] for index in range(40)]
