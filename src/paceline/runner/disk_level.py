"""Opens the disk below an engine: what its blocks depend on, how many it holds and how fast it is.

Everything that follows from the folder becomes a part of the engine's config, so that a run log has it; what survived
there is an input of the scheduler. Decision: docs/decisions/0047-the-disk.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.config.engine import EngineConfig, ModelConfig, PreemptionCosts
from paceline.core.plan import Runner
from paceline.core.request import BlockKey
from paceline.core.store import NO_STORE_WORK, BlockHead, StoreWork
from paceline.errors import ConfigError
from paceline.models.files.open import Checkpoint
from paceline.runner.disk_store import DiskStore
from paceline.runner.stores import HostBlocks, StoreThreads, StoringRunner
from paceline.scheduler.scheduler import Scheduler

DEFAULT_BYTES = 16 << 30
LEAST_STAGING = 64
STAGING_PART = 8  # of the device's blocks that a staging area may have
SAMPLED_BYTES = 4096  # of every tensor
LAYOUT = 1  # of blocks in host memory: another number where the same fingerprint would mean other bytes


def fingerprint(checkpoint: Checkpoint, about: object) -> bytes:
    """A digest of everything that a block's bytes depend on beside its tokens and adapter, which are in its key.

    Of the weights: the names, types and shapes of all tensors, and some bytes of each. `about`: what computes, with
    which types, in blocks of which size.
    """
    digest = hashlib.blake2b(repr((LAYOUT, checkpoint.kind, checkpoint.spec, about)).encode(), digest_size=32)
    for name in sorted(checkpoint.names()) if checkpoint.kind != "dummy" else ():
        tensor = checkpoint.tensor(name)
        digest.update(repr((name, tensor.shape, tensor.dtype, tensor.raw.nbytes)).encode())
        step = max(1, tensor.raw.nbytes // SAMPLED_BYTES)
        digest.update(tensor.raw[::step][: 2 * SAMPLED_BYTES].tobytes())
    return digest.digest()


class DiskLevel:
    """A folder below one engine. Its threads begin with `start`."""

    def __init__(self, store: DiskStore, block_bytes: int, write_rate: int | None) -> None:
        """`write_rate`: bytes a second; None: half of what the disk shows."""
        self.store = store
        self._block_bytes, self._write_rate = block_bytes, write_rate
        self._threads: StoreThreads | None = None
        self._scheduler: Scheduler | None = None

    @classmethod
    def open(
        cls, model: ModelConfig, config: EngineConfig, block_bytes: int, checkpoint: Checkpoint, about: object
    ) -> DiskLevel | None:
        """That of --kv-disk-dir; None where there is none. `about`: see `fingerprint`. Raises ConfigError."""
        if model.kv_disk_dir is None:
            return None
        if any(group.window for group in config.kv.groups):
            raise ConfigError(
                "--kv-disk-dir: this model has layers with a sliding window, whose prefixes stay on the device"
            )
        if not config.kv.enable_prefix_caching or config.scheduler.mode != "continuous":
            raise ConfigError("--kv-disk-dir keeps prefixes: it needs prefix caching and --mode continuous")
        store = DiskStore(
            Path(model.kv_disk_dir),
            size=DEFAULT_BYTES if model.kv_disk_size is None else model.kv_disk_size,
            place_bytes=block_bytes,
            fingerprint=fingerprint(checkpoint, about),
        )
        return cls(store, block_bytes, model.kv_disk_write_rate)

    def with_places(self, config: EngineConfig) -> EngineConfig:
        """With the places of the disk. Where the host keeps no prefixes, some of its places are the way there.

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
        """With what the disk shows."""
        write_rate, read_rate = self.store.measure()
        budget = write_rate / 2 if self._write_rate is None else self._write_rate
        return replace(
            costs, disk_block_s=self._block_bytes / read_rate, disk_write_s=self._block_bytes / budget
        )

    def start(self, runner: Runner, host: HostBlocks) -> StoringRunner:
        """A runner that moves blocks too; `host`: the places of the other one."""
        self._threads = StoreThreads(self.store, host, self._block_bytes)
        return StoringRunner(runner, self._threads)

    def attach(self, scheduler: Scheduler) -> tuple[str, ...]:
        """Tell a scheduler what survived; returns what an operator should know."""
        self._scheduler = scheduler
        kept, learned = dict(_once(self.store.entries())), self.store.load_tables()
        if not kept and not learned:
            return ()
        keys = [BlockKey(head.key, b"", head.check) for head in kept.values()]
        scheduler.restore(list(kept), keys, [head.uses for head in kept.values()], learned)
        return (f"--kv-disk-dir: {len(kept)} blocks of earlier runs",)

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


def _once(entries: Iterable[tuple[int, BlockHead]]) -> Iterator[tuple[int, BlockHead]]:
    """Of entries with one key the first: the others are of no use."""
    seen: set[bytes] = set()
    for place, head in entries:
        if head.key not in seen:
            seen.add(head.key)
            yield place, head
