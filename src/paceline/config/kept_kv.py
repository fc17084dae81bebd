"""Which options for KV that outlives a server go together."""

from __future__ import annotations

from typing import Protocol

from paceline.errors import ConfigError


class KeptKV(Protocol):
    """The options of a model that say where its KV is kept."""

    @property
    def kv_disk_dir(self) -> str | None: ...
    @property
    def kv_disk_size(self) -> int | None: ...
    @property
    def kv_disk_write_rate(self) -> int | None: ...
    @property
    def kv_store(self) -> str | None: ...
    @property
    def kv_store_key(self) -> str | None: ...


def check_kept(model: KeptKV) -> None:
    """Raise ConfigError for options that contradict one another."""
    if model.kv_disk_dir is not None and model.kv_store is not None:
        raise ConfigError("--kv-disk-dir and --kv-store are the same level: give one of them")
    if model.kv_disk_dir is None and model.kv_disk_size:
        raise ConfigError(
            "--kv-disk-size needs --kv-disk-dir; the size of --kv-store is the maxmemory of redis"
        )
    if model.kv_disk_write_rate and model.kv_disk_dir is None and model.kv_store is None:
        raise ConfigError("--kv-disk-write-rate needs --kv-disk-dir or --kv-store")
    if (model.kv_store is None) != (model.kv_store_key is None):
        raise ConfigError(
            "--kv-store and --kv-store-key go together: servers that share a store share the file of its key"
        )
