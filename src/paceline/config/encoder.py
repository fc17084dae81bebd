"""The encoder of a model that sees pictures: options of pictures, and what its work takes, as plain numbers.

The work of a group of pictures is a line of 2 x layers x units positions: in each layer the keys and values of all
units, then attention and what follows, unit by unit. Decision: docs/decisions/0054-media-in-steps.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.options import CheckedOptions, option

ENCODE_PARTS = ("pieces", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWork:
    """The encoder of a model that sees pictures, and what its work takes."""

    layers: int
    num_pages: int  # in memory, for its vectors
    max_units: int  # of a group of items, unless one of them has more
    page_vectors: int = 64
    # Positions of its line that take as long as a token of a prompt: those of attention and what follows.
    token_positions: float = 1.0
    product_share: float = 0.0  # of the time of such a position, more for each unit that it attends to
    keys_share: float = 1.0  # of that time, what a position of keys and values takes
    least: str = "position"  # part of the line that a step computes: a position, a layer, or all of the line

    def prices(self, products: int) -> tuple[float, float]:
        """In tokens of a prompt: a position of keys and values, and one of attention to `products` units."""
        return self.keys_share / self.token_positions, (
            1.0 + self.product_share * products
        ) / self.token_positions

    def positions(self, tokens: float, first: int, units: int, products: int) -> int:
        """How many positions from `first` on take at most this number of tokens of a prompt, of a line without end."""
        prices, left, at = self.prices(products), tokens, first
        while left > 0:
            stage, start = divmod(at, units)
            count = min(units - start, int(left / prices[stage % 2]))
            left -= count * prices[stage % 2]
            at += count
            if start + count < units:
                break
        return at - first

    def tokens(self, first: int, count: int, units: int, products: int) -> float:
        """What `count` positions from `first` on take, in tokens of a prompt."""
        prices, total, end = self.prices(products), 0.0, first + count
        while first < end:
            stage, start = divmod(first, units)
            stop = min(end, first + units - start)
            total += (stop - first) * prices[stage % 2]
            first = stop
        return total

    def least_positions(self, units: int) -> int:
        """Of the least part; a part has a whole number of them."""
        if self.least == "position":
            return 1
        return 2 * units * (self.layers if self.least == "line" else 1)

    def pages_of(self, outputs: int) -> int:
        return -(-outputs // self.page_vectors)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions(CheckedOptions):
    """A part of `ModelConfig`."""

    limit_mm_per_prompt: str = option(
        '{"image": 20}', "most pictures of a prompt", panel="Pictures", metavar="JSON"
    )
    mm_processor_kwargs: str = option(
        "",
        "settings of pictures instead of those in the model's preprocessor_config.json, such as max_pixels",
        panel="Pictures",
        metavar="JSON",
    )
    mm_processor_cache_gb: float = option(
        0.25, "GiB of memory for pictures that were decoded and resized", low=0.0, panel="Pictures"
    )
    share_media_cache: bool = option(
        False, "tenants use the pictures that were prepared for others", panel="Pictures"
    )
