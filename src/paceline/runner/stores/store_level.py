"""Opens the store below an engine, a disk or one that servers share: what its blocks depend on, how many it holds and
how fast it is.

Everything that follows from it becomes a part of the engine's config, so that a run log has it; what survived there,
and what others leave there, is an input of the scheduler. Decision: docs/decisions/0047-the-disk.md.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from paceline.config.engine import EngineConfig, ModelConfig, PreemptionCosts
from paceline.core.plan import Runner
from paceline.core.request import BlockKey
from paceline.core.store import ANYWHERE, NO_STORE_WORK, BlockHead, BlockStore, StoreWork
from paceline.errors import ConfigError
from paceline.models.files.open import Checkpoint
from paceline.runner.stores.disk_store import DiskStore
from paceline.runner.stores.redis_store import RedisStore
from paceline.runner.stores.store_threads import HostBlocks, StoreThreads, StoringRunner
from paceline.scheduler.scheduler import Scheduler

DEFAULT_BYTES = 16 << 30
LEAST_STAGING = 64
STAGING_PART = 8  # of the device's blocks that a staging area may have
SAMPLED_BYTES = 4096  # of every tensor
TOLD_TOGETHER = 256  # most heads of other servers that a plan takes in
LAYOUT = 1  # of blocks in host memory: another number where the same fingerprint would mean other bytes

_logger = logging.getLogger("paceline")


class OpenStore(BlockStore, Protocol):
    """A store, with what is asked of it outside the seam."""

    flag: str  # that names it
    is_shared: bool  # other servers write to it too
    notices: tuple[str, ...]  # what an operator should know
    key: bytes  # the keys of prefixes are made with it

    def measure(self) -> tuple[float, float]:
        """Bytes a second that can be written and read."""
        ...

    def save_tables(self, tables: Sequence[Sequence[float]]) -> None: ...
    def load_tables(self) -> tuple[tuple[float, ...], ...]: ...
    def close(self) -> None: ...


def fingerprint(checkpoint: Checkpoint, about: object) -> bytes:
    """A digest of everything that a block's bytes depend on beside its tokens and adapter, which are in its key.

    Of the weights: the names, types and shapes of all tensors, and some bytes of each. `about`: what computes, with
    which types, in blocks of which size.
    """
    known = (LAYOUT, platform.machine(), checkpoint.kind, checkpoint.spec, about)
    digest = hashlib.blake2b(repr(known).encode(), digest_size=32)
    for name in sorted(checkpoint.names()) if checkpoint.kind != "dummy" else ():
        tensor = checkpoint.tensor(name)
        digest.update(repr((name, tensor.shape, tensor.dtype, tensor.raw.nbytes)).encode())
        step = max(1, tensor.raw.nbytes // SAMPLED_BYTES)
        digest.update(tensor.raw[::step][: 2 * SAMPLED_BYTES].tobytes())
    return digest.digest()


class StoreLevel:
    """A store below one engine. Its threads begin with `start`."""

    def __init__(self, store: OpenStore, block_bytes: int, write_rate: int | None) -> None:
        """`write_rate`: bytes a second; None: half of what the store shows."""
        self.store = store
        self._block_bytes, self._write_rate = block_bytes, write_rate
        self._threads: StoreThreads | None = None
        self._scheduler: Scheduler | None = None

    @classmethod
    def open(
        cls, model: ModelConfig, config: EngineConfig, block_bytes: int, checkpoint: Checkpoint, about: object
    ) -> StoreLevel | None:
        """That of --kv-disk-dir or --kv-store; None where there is none. `about`: see `fingerprint`.

        Raises ConfigError. A server without its shared store is slower, and serves.
        """
        flag = "--kv-disk-dir" if model.kv_disk_dir is not None else "--kv-store"
        if model.kv_disk_dir is None and model.kv_store is None:
            return None
        if any(group.window for group in config.kv.groups):
            raise ConfigError(
                f"{flag}: this model has layers with a sliding window, whose prefixes stay on the device"
            )
        if not config.kv.enable_prefix_caching or config.scheduler.mode != "continuous":
            raise ConfigError(f"{flag} keeps prefixes: it needs prefix caching and --mode continuous")
        known = fingerprint(checkpoint, (config.kv.block_size, about))
        store: OpenStore
        if model.kv_disk_dir is not None:
            size = DEFAULT_BYTES if model.kv_disk_size is None else model.kv_disk_size
            folder = Path(model.kv_disk_dir)
            store = DiskStore(folder, size=size, place_bytes=block_bytes, fingerprint=known)
        else:
            assert model.kv_store is not None and model.kv_store_key is not None
            key = Path(model.kv_store_key)
            try:
                store = RedisStore.open(model.kv_store, key, place_bytes=block_bytes, fingerprint=known)
            except OSError as error:
                _logger.warning("--kv-store cannot be reached, and is off until the next start: %s", error)
                return None
        return cls(store, block_bytes, model.kv_disk_write_rate)

    def with_places(self, config: EngineConfig) -> EngineConfig:
        """With the places of the store. Where the host keeps no prefixes, some of its places are the way there.

        A prompt is loaded in one piece, so that the longest should fit; what no request needs is never touched.
        """
        kv, staging = config.kv, 0
        if not kv.cache_on_host:
            longest = -(-config.scheduler.max_model_len // kv.block_size)
            staging = max(LEAST_STAGING, min(longest, kv.num_blocks // STAGING_PART))
        kv = replace(
            kv,
            cache_on_host=True,
            num_host_blocks=kv.num_host_blocks + staging,
            num_staging_blocks=staging,
            num_disk_blocks=self.store.num_places,
        )
        return replace(config, kv=kv)

    def with_rates(self, costs: PreemptionCosts) -> PreemptionCosts:
        """With what the store shows."""
        write_rate, read_rate = self.store.measure()
        budget = write_rate / 2 if self._write_rate is None else self._write_rate
        return replace(
            costs, disk_block_s=self._block_bytes / read_rate, disk_write_s=self._block_bytes / budget
        )

    def start(self, runner: Runner, host: HostBlocks) -> StoringRunner:
        """A runner that moves blocks too; `host`: the places of the other one. The next one, after a `pause`, has the
        same threads."""
        if self._threads is None:
            self._threads = StoreThreads(self.store, host, self._block_bytes, is_shared=self.store.is_shared)
        self._threads.host = host
        return StoringRunner(runner, self._threads)

    def pause(self) -> None:
        """The places are about to go, and nothing moves until there are others."""
        if self._threads is not None:
            self._threads.forget()
            self._threads.host = None

    def attach(self, scheduler: Scheduler) -> tuple[str, ...]:
        """Tell a scheduler what survived; returns what an operator should know."""
        self._scheduler = scheduler
        learned = self.store.load_tables()
        try:
            kept = _once(self.store.entries())
        except OSError as error:
            _logger.warning("%s: what earlier runs have left cannot be read: %s", self.store.flag, error)
            kept = []
        if kept or learned:
            _restore(scheduler, kept, learned)
        found = (f"{self.store.flag}: {len(kept)} blocks of earlier runs",) if kept or learned else ()
        return self.store.notices + found

    @property
    def is_shared(self) -> bool:
        return self.store.is_shared

    def tell(self) -> None:
        """Before a plan: tell the scheduler what other servers have left."""
        threads, scheduler = self._threads, self._scheduler
        if threads is None or scheduler is None or not threads.news or threads.is_off:
            return
        count = min(len(threads.news), TOLD_TOGETHER)
        _restore(scheduler, _once((ANYWHERE, threads.news.popleft()) for _ in range(count)))

    def work(self) -> StoreWork:
        return NO_STORE_WORK if self._threads is None else self._threads.work()

    def close(self) -> None:
        """End the threads and keep what was learned."""
        if self._threads is not None:
            self._threads.close()
        if self._scheduler is not None:
            with suppress(OSError):  # it is worth little
                self.store.save_tables(self._scheduler.state.kv.learned())
        self.store.close()


def _restore(
    scheduler: Scheduler,
    kept: Sequence[tuple[int, BlockHead]],
    learned: tuple[tuple[float, ...], ...] = (),
) -> None:
    places = [place for place, _ in kept if place != ANYWHERE]
    keys = [BlockKey(head.key, b"", head.check) for _, head in kept]
    scheduler.restore(places, keys, [head.uses for _, head in kept], learned)


def _once(entries: Iterable[tuple[int, BlockHead]]) -> list[tuple[int, BlockHead]]:
    """Of entries with one key the first: the others are of no use."""
    found: dict[bytes, tuple[int, BlockHead]] = {}
    for place, head in entries:
        found.setdefault(head.key, (place, head))
    return list(found.values())
