"""What a key says of its caller: service class, names of limits, prices.

Closed sets, so that they can be labels of metrics and columns of bills. Knows nothing of files, keys and requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from paceline.core.service_class import DEFAULT_CLASS

REQUESTS, TOKENS = "requests_per_minute", "tokens_per_minute"
CONCURRENCY, PRIORITY = "max_concurrency", "lowest_priority_number"
LIMITS = (REQUESTS, TOKENS, CONCURRENCY, PRIORITY)  # by the names they have in the keys file
LARGEST_PRIORITY = 2**31 - 1
# The smallest and the largest number that each limit can be.
BOUNDS = {
    REQUESTS: (1, 10**9),
    TOKENS: (1, 10**12),
    CONCURRENCY: (1, 10**6),
    PRIORITY: (-LARGEST_PRIORITY, LARGEST_PRIORITY),
}
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1e6
LARGEST_PRICE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a key pays before the factor of its class, in whatever unit the operator counts: exact numbers."""

    prompt: Decimal = Decimal(0)  # for a million prompt tokens that were computed
    cached_prompt: Decimal = Decimal(0)  # for a million that were found in the cache
    output: Decimal = Decimal(0)  # for a million generated tokens
    kv_block_second: Decimal = Decimal(0)  # for one KV block held for one second


FREE = Prices()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, as far as its key tells; without keys, the default tenant."""

    tenant: str = "default"
    service_class: str = DEFAULT_CLASS
    weight: float = 1.0  # the tenant's share where tenants compete
    cache_share: float = 1.0  # of the KV cache, beyond which what the tenant left is evicted first
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers together
    max_concurrency: int | None = None
    lowest_priority_number: int | None = None  # a request may not ask for a smaller one
    prices: Prices = FREE
    adapters: frozenset[str] | None = None  # that it may name as models; None: all
    is_admin: bool = False  # may use routes that change or show the server as a whole
    batch_id: str = ""  # of the batch that asks on behalf of the key, if one does

    def may_name(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters
