"""One row, three tenants: the order in which requests begin under three policies.

In the order of arrival all tenants wait behind one that floods. By shares (`fair`) the others come in between; by
`priority`, the lower number goes first, whichever tenant sends it.

    python examples/04_priorities_and_tenants.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams
from paceline.core.service_class import ServiceLevel

FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ARRIVALS = [("flood", 1)] * 5 + [("alice", 1), ("bob", 0)]  # tenant and priority

# One row: the first in order runs alone, which makes the order easy to see.
llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=1)
engine, tokenizer = llm.loaded.engine, llm.get_tokenizer()


def begins(policy: str) -> list[str]:
    """The names of all requests, in the order of their first tokens."""
    llm.set_policy(policy)
    names, order = {}, []
    for number, (tenant, priority) in enumerate(ARRIVALS):
        (request,) = engine.add(
            tokenizer.encode("Hello"), FEW, tenant=tenant, service_level=ServiceLevel(priority=priority)
        )
        names[request] = f"{tenant}{number}"
    while engine.has_requests:
        for delivered in engine.step().tokens:
            order += [names[request] for request in delivered.requests[delivered.index == 0].tolist()]
    return order


for policy in ("fcfs", "fair", "priority"):
    print(f"{policy}: {' '.join(begins(policy))}")
