"""Three streams in one event loop: one is read to its end, one is left early, one is ended by its name.
Leaving the iterator in any way ends the request and frees its memory at once.

    python examples/03_async_and_abort.py [MODEL]
"""

import asyncio
import sys

from paceline import AsyncLLM, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


async def whole(llm: AsyncLLM) -> str:
    async for output in llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40)):
        last = output  # each item is the whole output so far
    return f"read to its end: finish_reason {last.outputs[0].finish_reason}"


async def left_early(llm: AsyncLLM) -> str:
    async for output in llm.generate("A long story:", LONG):
        if len(output.outputs[0].token_ids) >= 5:
            break
    return "left early: after a few tokens"


async def ended_by_name(llm: AsyncLLM) -> str:
    async for output in llm.generate("Another one:", LONG, request_id="mine"):
        last = output
        await llm.abort("mine")
    return f"ended by its name: finish_reason {last.outputs[0].finish_reason}"


async def main() -> None:
    llm = AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else None)
    print(*await asyncio.gather(whole(llm), left_early(llm), ended_by_name(llm)), sep="\n")
    llm.shutdown()


asyncio.run(main())
