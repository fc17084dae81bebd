"""Memory of several models in one process: what each of them is to know of it before it is loaded, and its owners then.

Beside the factory, which makes one engine and knows no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.engine import ModelConfig
from paceline.config.models import ModelShare, SharedMemory
from paceline.errors import ConfigError
from paceline.factory import LoadedModel
from paceline.kv.slabs import Owner, SlabMarket


def share_memory(
    models: Sequence[tuple[ModelConfig, Mapping[str, Any], ModelShare]], memory_bytes: int | None
) -> list[SharedMemory | None]:
    """What each of several models is to know of the memory they share; None: it has its own."""
    from paceline.runner.device import choose_device

    devices = {choose_device(model) for model, _, _ in models} if len(models) > 1 else set()
    if len(devices) > 1:
        raise ConfigError("models of one server take turns on one device: give all of them the same --device")
    if devices != {"cuda"}:
        for _, _, share in models:
            if share.kv_floor_bytes or share.kv_ceiling_bytes:
                raise ConfigError(
                    "kv_floor_bytes and kv_ceiling_bytes are for several models on a GPU, which share KV memory: "
                    "give kv_cache_memory_bytes"
                )
        return [None] * len(models)
    import torch

    from paceline.models.files.fetch import resolve
    from paceline.models.files.open import open_checkpoint
    from paceline.runner.gpu import build

    opened = []
    for model, given, _ in models:
        path = resolve(model.model, model.revision, model.download_dir)
        opened.append((model, given, open_checkpoint(path, load_format=model.load_format)))
    device = torch.device("cuda", torch.cuda.current_device())
    memory, kv_slabs = build.share_memory(opened, memory_bytes, device)
    total = sum(share.share for _, _, share in models)
    return [
        SharedMemory(
            num_slabs=memory.num_slabs,
            slab_bytes=memory.slab_bytes,
            kv_slabs=kv_slabs,
            part=share.share / total,
            floor_bytes=share.kv_floor_bytes,
            ceiling_bytes=share.kv_ceiling_bytes,
            device=memory,
        )
        for _, _, share in models
    ]


def slab_market(
    models: Sequence[LoadedModel], shares: Sequence[ModelShare], memory: Sequence[SharedMemory | None]
) -> SlabMarket | None:
    """Of models that share their memory; None: each has its own."""
    if memory[0] is None:
        return None
    owners = []
    for loaded, share in zip(models, shares, strict=True):
        kv = loaded.config.kv
        floor = kv.least_blocks // kv.slab_blocks
        owners.append(
            Owner(
                name=share.name,
                share=share.share,
                floor=floor,
                ceiling=kv.most_slabs,
                home=loaded.place.home,
                num_adapter_slabs=loaded.place.num_adapter_slabs,
            )
        )
    return SlabMarket(memory[0].num_slabs, owners, memory[0].slab_bytes)
