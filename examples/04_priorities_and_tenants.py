"""One row, three tenants: the order in which requests begin under `fcfs` and under `fair`.

A tenant that floods is served first by the order of arrival. By shares, the others do not wait behind all of it.

    python examples/04_priorities_and_tenants.py [MODEL]
"""

import asyncio
import sys

from paceline import AsyncLLM, SamplingParams

FEW = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ARRIVALS = ["flood"] * 5 + ["alice", "bob"]


async def begins(llm: AsyncLLM, policy: str) -> list[str]:
    await llm.set_policy(policy)
    order: list[str] = []

    async def ask(number: int, tenant: str) -> None:
        async for output in llm.generate(f"Request {number}", FEW, tenant=tenant, service_tier="standard"):
            if output.outputs[0].token_ids and tenant + str(number) not in order:
                order.append(tenant + str(number))

    await asyncio.gather(*(ask(number, tenant) for number, tenant in enumerate(ARRIVALS)))
    return order


async def main() -> None:
    # One row: whoever is first in order runs alone, which makes the order easy to see.
    llm = AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=1)
    for policy in ("fcfs", "fair"):
        print(f"{policy}: {' '.join(await begins(llm, policy))}")
    llm.shutdown()


asyncio.run(main())
