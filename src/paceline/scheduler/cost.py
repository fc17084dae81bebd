"""What a request has cost so far, brought up to date when it leaves a row and when it has caught up with itself.

A request that gave way computes again what it had: those tokens, and the blocks held meanwhile, are told apart, so that
nobody is made to pay for them. Nothing here runs in a steady step.
"""

from __future__ import annotations

from paceline.core.request import Cost, Request


def settle_cost(request: Request, computed: int, block_us: int) -> None:
    """A request is about to leave its row, where it has held blocks for `block_us`."""
    blocks_us, redone_us, redone, swaps = request.cost
    attained = request.attained
    if attained > request.joined_at:  # it had given up some of what it had
        if computed < attained:
            redone_us += block_us
        redone += max(0, min(computed, attained) - request.joined_at)
    request.cost = Cost(blocks_us + block_us, redone_us, redone, swaps)


def caught_up(request: Request, block_us: int) -> None:
    """A request has computed again all that it once had; until here it has held blocks for `block_us` on its row."""
    request.cost = request.cost._replace(redone_block_us=request.cost.redone_block_us + block_us)


def note_kind(request: Request) -> None:
    """A request has just given way: its KV is on the host, or gone."""
    if request.host_places:
        request.cost = request.cost._replace(swaps=request.cost.swaps + 1)
