"""`LLM` and `AsyncLLM` with logs: what they did can be replayed and verified like the run of a server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

from paceline import AsyncLLM, SamplingParams
from paceline.audit.runlog import read_run_log
from paceline.audit.trail import verify
from paceline.lab.sim.replayer import replay
from tests.torch.llm_helpers import OPTIONS

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SCRIPT = """
import sys
from paceline import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", num_blocks=96, run_log=sys.argv[2], decision_log=sys.argv[3])
llm.generate(["one", "two", "three"], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
"""


def test_a_run_of_async_llm_replays_and_its_decisions_verify(folder: Path, tmp_path: Path) -> None:
    llm = AsyncLLM(
        str(folder), **OPTIONS, run_log=str(tmp_path / "run.jsonl"), decision_log=str(tmp_path / "log")
    )

    async def work() -> None:
        async def whole(prompt: str) -> None:
            async for _ in llm.generate(prompt, GREEDY):
                pass

        async with aclosing(llm.generate("left early", GREEDY)) as stream:
            await anext(stream)
        await asyncio.gather(*(whole(f"prompt {number}") for number in range(5)))

    asyncio.run(asyncio.wait_for(work(), 60))
    llm.shutdown()
    report = replay(read_run_log(tmp_path / "run.jsonl"))
    assert report.is_equal and report.complete and report.num_steps > 20
    found = verify(tmp_path / "log")
    assert found.problem == "" and found.num_entries >= 12


def test_an_llm_whose_program_just_ends_leaves_its_logs(folder: Path, tmp_path: Path) -> None:
    log, decisions = tmp_path / "run.jsonl.gz", tmp_path / "log"
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(log), str(decisions)], check=True, timeout=120
    )
    report = replay(read_run_log(log))
    assert report.is_equal and not report.complete and report.num_steps >= 9
    assert verify(decisions).problem == "" and verify(decisions).num_entries >= 3
