"""The engine's per-request hooks: making prefix keys from token ids.

Prompt keys are made when a request is added, outside the step loop; keys of generated blocks are made once, when
the request leaves its row, so that a steady decode step hashes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import BlockKey, Request, RequestHooks, RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import Stretch, StretchKind
from paceline.kv.prefix import KeyMaker

MODULES = "module"  # in the root of their keys: no prompt finds what was computed for a module, and no module a prompt
KEYED_AT_ONCE = 4096  # tokens whose keys are made together: about a millisecond


class PrefixKeyHooks:
    """Hooks that know tokens; roots are kept per tenant, model and adapter."""

    def __init__(self, maker: KeyMaker) -> None:
        self._maker = maker
        self._roots: dict[tuple[str, int, int, str], bytes] = {}
        # What an adapter's number stands for: its identity is in the root, so that prefixes of one folder are shared by
        # all its numbers and never by another's.
        self.identity_of: Callable[[int], str] = lambda adapter: ""

    def use_key(self, key: bytes) -> bytes:
        """See `KeyMaker.use_key`."""
        self._roots.clear()
        return self._maker.use_key(key)

    def admit(self, request: Request) -> None:
        return None

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        if not request.stretches:
            return self._maker.extend(request.keys, request.tokens, self._root(request))
        marks = {stretch.start: _mark(request, stretch) for stretch in request.stretches}
        return self._maker.extend(request.keys, request.tokens, self._root(request), marks)

    def module_keys(self, request: Request, tokens: NDArray[np.int32]) -> list[BlockKey]:
        """The keys of a module that is placed in the prompt of a request."""
        return self._maker.extend((), tokens, self._root(request, MODULES))

    def media_key(self, request: Request, content: bytes) -> bytes:
        """The key of an item of a request: tenants share none."""
        return self._maker.media(self._root(request), content)

    def finish(self, request: Request) -> None:
        return None

    def _root(self, request: Request, kind: str = "") -> bytes:
        known = self.identity_of(request.adapter) if request.adapter else ""
        adapter = int(known, 16) if known else request.adapter
        identity = (request.tenant, request.model, adapter, MODULES if request.is_module else kind)
        root = self._roots.get(identity)
        if root is None:
            if len(self._roots) > 4096:
                self._roots.clear()
            root = self._roots[identity] = self._maker.root(*identity)
        return root


def _mark(request: Request, stretch: Stretch) -> bytes:
    """What stands at the beginning of a stretch beside its token: an item, or what is placed there, and how."""
    if stretch.kind is StretchKind.MEDIA:
        return request.media[stretch.item].key
    module = request.modules[stretch.item]
    return b"placed:%d:%d:" % (module.recompute, stretch.end - stretch.start) + module.keys[-1].key


def keys_in_parts(
    hooks: RequestHooks, tokens: NDArray[np.int32], tenant: str, adapter: int
) -> Iterator[list[BlockKey]]:
    """Those of a prompt without pictures and modules. Of a long one all together take longer than a step should."""
    request = Request(RequestId(0), tokens, SamplingParams(), tenant=tenant)
    request.adapter = adapter
    for end in range(KEYED_AT_ONCE, len(tokens) + KEYED_AT_ONCE, KEYED_AT_ONCE):
        request.tokens = tokens[:end]
        made = list(hooks.new_keys(request))
        request.keys += made
        yield made
