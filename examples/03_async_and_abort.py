"""Three streams in one event loop: one is read to its end, one is left early, one is ended by its name.

Leaving the iterator in any way ends the request and frees its memory at once.

    python examples/03_async_and_abort.py [MODEL]
"""

import asyncio
import sys

from paceline import AsyncLLM, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


async def whole(llm: AsyncLLM) -> str:
    outputs = [output async for output in llm.generate("Once upon a time", LONG)]  # each is all so far
    return f"read to its end: finish_reason {outputs[-1].outputs[0].finish_reason}"


async def left_early(llm: AsyncLLM) -> str:
    async for output in llm.generate("A long story:", LONG):
        if len(output.outputs[0].token_ids) >= 5:
            return "left early: after a few tokens"


async def ended_by_name(llm: AsyncLLM) -> str:
    async for output in llm.generate("Another one:", LONG, request_id="mine"):
        reason = output.outputs[0].finish_reason
        await llm.abort("mine")
    return f"ended by its name: finish_reason {reason}"


async def main() -> None:
    llm = AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else None)
    print(*await asyncio.gather(whole(llm), left_early(llm), ended_by_name(llm)), sep="\n")
    llm.shutdown()


asyncio.run(main())
