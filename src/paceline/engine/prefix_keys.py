"""The engine's per-request hooks: making prefix keys from token ids.

Prompt keys are made when a request is added, outside the step loop; keys of generated blocks are made once, when
the request leaves its row, so that a steady decode step hashes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.request import BlockKey, Request
from paceline.kv.prefix import KeyMaker


class PrefixKeyHooks:
    """Hooks that know tokens; roots are kept per tenant, model and adapter."""

    def __init__(self, maker: KeyMaker) -> None:
        self._maker = maker
        self._roots: dict[tuple[str, int, int], bytes] = {}
        # What an adapter's number stands for: its identity is in the root, so that prefixes of one folder are shared by
        # all its numbers and never by another's.
        self.identity_of: Callable[[int], str] = lambda adapter: ""

    def admit(self, request: Request) -> None:
        return None

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        if not request.stretches:
            return self._maker.extend(request.keys, request.tokens, self._root(request))
        marks = {stretch.start: request.media[stretch.item].key for stretch in request.stretches}
        return self._maker.extend(request.keys, request.tokens, self._root(request), marks)

    def media_key(self, request: Request, content: bytes) -> bytes:
        """The key of an item of a request: tenants share none."""
        return self._maker.media(self._root(request), content)

    def finish(self, request: Request) -> None:
        return None

    def _root(self, request: Request) -> bytes:
        known = self.identity_of(request.adapter) if request.adapter else ""
        adapter = int(known, 16) if known else request.adapter
        identity = (request.tenant, request.model, adapter)
        root = self._roots.get(identity)
        if root is None:
            if len(self._roots) > 4096:
                self._roots.clear()
            root = self._roots[identity] = self._maker.root(*identity)
        return root
