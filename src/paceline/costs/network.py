"""What several ranks of one model add to a step: their sums and gathers over a link, and what each of them holds.

A link is a latency and a bandwidth. Two ways to sum are known, as in the kernels that do it: every rank reads all parts
at once, or each sums a share that is then gathered; the shorter one is taken. Knows no scheduler and no device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.costs.presets import ModelShape
from paceline.errors import InputError

TWO_SHOT_LATENCIES = 3  # signal, share, signal: what a sum in two parts waits for, in latencies of one part
SUMS_PER_LAYER = 2  # behind attention and behind the feed-forward part
CANDIDATE_BYTES = 400  # a row's best ids with their logits, by tiles of a divided vocabulary of 128k ids
LEAD_S = 40e-6  # to write a plan for the others and tell them, whatever the plan
MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between any two ranks, or any two places. Bandwidth in bytes/s and direction, as far as programs reach it."""

    name: str
    latency_s: float
    bandwidth: float
    source: str = ""

    def sum_seconds(self, num_bytes: float, ranks: int) -> float:
        """Until every one of `ranks` has the sum of parts of this size."""
        if ranks < 2 or not num_bytes:
            return 0.0
        part_s = num_bytes / self.bandwidth
        one_shot_s = self.latency_s + (ranks - 1) * part_s
        two_shot_s = TWO_SHOT_LATENCIES * self.latency_s + 2.0 * (ranks - 1) / ranks * part_s
        return min(one_shot_s, two_shot_s)

    def gather_seconds(self, num_bytes: float, ranks: int) -> float:
        """Until every one of `ranks` has what all hold, `num_bytes` together."""
        if ranks < 2 or not num_bytes:
            return 0.0
        return self.latency_s + (ranks - 1) / ranks * num_bytes / self.bandwidth

    def copy_seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bandwidth


# NVLink 4 by the sums that vLLM published of H100s (8,192 wide, bf16): two cards 0.5 MB 7 us; four cards 0.5 / 1 / 4 MB
# 10 / 15 / 38 us in one part and 16-18 / 19 / 29 us in two. These two numbers give all seven within 15 %.
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link(name="nvlink4", latency_s=5e-6, bandwidth=400e9, source="published sums on H100s"),
        Link(
            name="nvlink5", latency_s=5e-6, bandwidth=800e9, source="twice NVLink 4, as its data sheet has it"
        ),
        Link(
            name="pcie5", latency_s=10e-6, bandwidth=50e9, source="16 lanes, 64 GB/s published; share assumed"
        ),
        Link(name="ib-ndr", latency_s=15e-6, bandwidth=45e9, source="400 Gbit/s published; share assumed"),
        Link(
            name="eth-100g", latency_s=50e-6, bandwidth=11e9, source="100 Gbit/s; share and latency assumed"
        ),
        Link(name="wan", latency_s=35e-3, bandwidth=1e9, source="between regions of a continent; assumed"),
    )
}


def link_of(name: str) -> Link:
    link = LINKS.get(name.lower())
    if link is None:
        raise InputError(f"unknown link '{name}'; known ones are {', '.join(LINKS)}")
    return link


def possible_ranks(model: ModelShape) -> tuple[int, ...]:
    """Into how many equal parts heads, keys and values, the inner layer and the vocabulary can be cut. Where there are
    fewer key/value heads than ranks, they are repeated."""
    return tuple(
        ranks
        for ranks in range(1, MAX_RANKS + 1)
        if model.heads % ranks == model.intermediate % ranks == model.vocab % ranks == 0
        and (model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0)
    )


def rank_shape(model: ModelShape, ranks: int) -> ModelShape:
    """What one of `ranks` computes and holds: heads, the inner layer and the LM head are divided; the embedding, the
    norms and the encoder of pictures are whole."""
    if ranks == 1:
        return model
    sizes = possible_ranks(model)
    if ranks not in sizes:
        raise InputError(
            f"{model.name} cannot be cut into {ranks}: it has {model.heads} heads, {model.kv_heads} of keys and "
            f"values; possible sizes are {', '.join(map(str, sizes))}"
        )
    return replace(
        model,
        heads=model.heads // ranks,
        kv_heads=max(1, model.kv_heads // ranks),
        intermediate=model.intermediate // ranks,
        head_vocab=model.vocab // ranks,
    )
