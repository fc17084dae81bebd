"""Memory that models share: every block has bytes of its own, and weights come back to where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.engine import GroupSpec, KVConfig
from paceline.core.counters import SlabUse
from paceline.core.plan import NO_SWAPS, BlockAppends, BlockCopies, StepPlan, Swaps
from paceline.kv.slabs import Owner, SlabMarket
from paceline.models.files.open import open_checkpoint
from paceline.models.layers import DenseLinear
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.device_queue import DeviceQueue
from paceline.runner.gpu.kv_pools import KVPools, SwapPool, part_shape
from paceline.runner.gpu.slab_memory import (
    MIB,
    GPUSleeper,
    Home,
    OwnHome,
    PartShape,
    SlabMemory,
    choose_slab_bytes,
)
from tests.model_folder import write_model

CPU = torch.device("cpu")


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    write_model(folder, vocab_size=64, max_position_embeddings=512, tie_word_embeddings=True, **changes)
    return open_checkpoint(folder, load_format="dummy").spec


def column(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


class Shared:
    """Two models, of other sizes and types, and one of them with its blocks in units."""

    def __init__(self, folder: Path) -> None:
        specs = [spec_of(folder / "a"), spec_of(folder / "b", num_hidden_layers=3, num_key_value_heads=1)]
        kinds = [torch.float32, torch.bfloat16]
        shapes = [part_shape(spec, kind) for spec, kind in zip(specs, kinds, strict=True)]
        self.memory = SlabMemory(4, choose_slab_bytes(shapes, 200_000, 300_000), CPU)
        self.pools, self.sizes = [], []
        for spec, kind, shape in zip(specs, kinds, shapes, strict=True):
            count = self.memory.slab_bytes // shape.block_bytes
            config = KVConfig(
                block_size=64, num_blocks=4 * count, slab_blocks=count, least_blocks=count, num_host_blocks=2
            )
            tables = [torch.zeros(1, 4, dtype=torch.int32)]
            self.pools.append(KVPools(spec, config, tables, kind, memory=self.memory))
            self.sizes.append(count)

    def units(self, model: int, *blocks: int) -> list[int]:
        many = column(*([0] * len(blocks)))
        appends = BlockAppends(row=many, group=many, index=many, block=column(*blocks))
        plan = self.pools[model].in_units(StepPlan(seq=1, new_blocks=appends))
        found: list[int] = plan.new_blocks.block.tolist()
        return found


def test_blocks_of_models_that_share_memory_have_their_own_bytes(tmp_path: Path) -> None:
    shared = Shared(tmp_path)
    slab_bytes = shared.memory.slab_bytes
    for model, slabs in ((0, (1, 3)), (1, (2,))):
        pools, size = shared.pools[model], shared.sizes[model]
        blocks = [slab * size + place for slab in slabs for place in range(size)]
        for block, unit in zip(blocks, shared.units(model, *blocks), strict=True):
            for layer in pools.layers:
                for part in (layer.keys[unit], layer.values[unit]):
                    first = part.data_ptr() - shared.memory.bytes.data_ptr()
                    assert first // slab_bytes == (first + part.nbytes - 1) // slab_bytes == block // size
                    part.view(torch.uint8).add_(1)
    assert int(shared.memory.bytes.max()) == 1, "no byte is of two blocks"
    used = shared.memory.bytes.view(4, slab_bytes).sum(1, dtype=torch.int64).tolist()
    assert used[0] == 0 and all(count > 0.9 * slab_bytes for count in used[1:])
    assert shared.units(0, 0) == shared.units(1, 0) == [0], "null blocks are in the first slab"


def test_blocks_are_copied_and_swapped_from_slab_to_slab(tmp_path: Path) -> None:
    shared = Shared(tmp_path)
    pools, size = shared.pools[0], shared.sizes[0]
    source, target, third = size + 1, 3 * size + 2, 3 * size
    units = shared.units(0, source, target, third)
    for number, layer in enumerate(pools.layers):
        layer.keys[units[0]], layer.values[units[0]] = number + 1, -number - 1
    one = column(0)
    copies = BlockCopies(row=one, group=one, index=one, source=column(source), target=column(target))
    out = Swaps(ticket=column(4), group=one, block=column(source), place=one)
    back = Swaps(ticket=column(5), group=one, block=column(third), place=one)
    plan = pools.in_units(StepPlan(seq=1, block_copies=copies, swap_out=out, swap_in=back))
    pools.copy_blocks(plan.block_copies)
    places = SwapPool(pools.blocks, 2, DeviceQueue(CPU))
    places.swap(plan.swap_out, NO_SWAPS)
    places.swap(NO_SWAPS, plan.swap_in)
    for layer in pools.layers:
        for unit in units[1:]:
            assert torch.equal(layer.keys[unit], layer.keys[units[0]]) and layer.keys[unit].any()
            assert torch.equal(layer.values[unit], layer.values[units[0]]) and layer.values[unit].any()


def test_a_model_alone_has_one_slab_and_the_addresses_it_always_had(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "a")
    config = KVConfig(block_size=64, num_blocks=6, groups=(GroupSpec(),))
    pools = KVPools(spec, config, [torch.zeros(1, 4, dtype=torch.int32)], torch.float32)
    plan = StepPlan(seq=1)
    assert pools.in_units(plan) is plan
    parts = [part for layer in pools.layers for part in (layer.keys, layer.values)]
    assert all(part.shape == (6, 2, 64, 16) and part.is_contiguous() for part in parts)
    begin = [part.data_ptr() - parts[0].data_ptr() for part in parts]
    assert begin == [number * parts[0].nbytes for number in range(4)]


@pytest.mark.parametrize("is_kept", [True, False])
def test_weights_come_back_to_where_they_were(is_kept: bool) -> None:
    memory = SlabMemory(5, 4096, CPU)
    random = torch.Generator().manual_seed(1)
    matrices = [torch.randn(16, 24, generator=random), torch.randn(40, 30, generator=random).T]
    home = memory.home()
    placed = [home.place(DenseLinear(each.clone()), str(place)) for place, each in enumerate(matrices)]
    assert home.slabs == range(1, 3) and memory.home().slabs.start == 3
    weights: list[torch.Tensor] = [each.weight for each in placed]  # type: ignore[attr-defined]
    addresses = [weight.data_ptr() for weight in weights]
    if is_kept:
        home.keep()
    memory.bytes.fill_(0x5A)
    if not home.bring_back():
        assert not is_kept
        again = home.again()
        for place in (1, 0):  # threads read them, in any order
            again.place(DenseLinear(matrices[place].clone()), str(place))
    assert [weight.data_ptr() for weight in weights] == addresses
    assert all(torch.equal(*pair) for pair in zip(weights, matrices, strict=True))
    with pytest.raises(torch.OutOfMemoryError, match="do not fit"):
        memory.home().place(DenseLinear(torch.zeros(1 << 12)), "too large")


def test_adapters_have_the_slabs_behind_the_weights() -> None:
    memory = SlabMemory(8, 4096, CPU)
    home = memory.home()
    home.place(DenseLinear(torch.zeros(16, 24)), "a")
    pool = home.beside(4097)
    assert len(pool) == 4097 and pool.data_ptr() == memory.bytes[2 * 4096 :].data_ptr()
    assert home.slabs == range(1, 4) and home.num_beside == 2 and memory.home().slabs.start == 4
    owner = Owner(name="a", floor=1, ceiling=8, home=home.slabs, num_adapter_slabs=home.num_beside)
    market = SlabMarket(8, [owner])
    assert market.use(0) == SlabUse(kv=0, weights=1, adapters=2, all=7)
    home.keep()
    memory.bytes.fill_(1)
    home.bring_back()
    assert pool.all(), "adapters are read again: they are not kept"
    market.leave_home(0)
    assert market.use(0) == SlabUse(all=7)


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_of_a_model_alone_goes_and_comes_back(is_kept: bool) -> None:
    home = OwnHome(CPU)
    linear: DenseLinear = DenseLinear(torch.randn(16, 24))
    expected = linear.weight.clone()
    home.place(linear, "a")
    pool = home.beside(100)
    home.blank.append(torch.ones(50, dtype=torch.uint8))

    def load(into: Home) -> None:
        into.place(DenseLinear(expected.clone()), "a")

    class Gone(Exception):
        pass

    def fail(_: Home) -> None:
        raise Gone

    runner: Any = object()
    sleeper = GPUSleeper(home, fail, runner)
    sleeper.let_go(1 if is_kept else 2)
    assert not any(each.untyped_storage().nbytes() for each in (linear.weight, *home.blank))
    if not is_kept:
        with pytest.raises(Gone):
            sleeper.open()
        assert not linear.weight.untyped_storage().nbytes(), "a wake that fails takes no memory"
        sleeper._load = load
    assert sleeper.open() is runner
    assert torch.equal(linear.weight, expected) and not pool.any() and not home.blank[1].any()


def test_the_size_of_slabs_wastes_little() -> None:
    large = PartShape(64, 8, 128, torch.bfloat16)  # 8B
    small = PartShape(56, 8, 128, torch.bfloat16)  # 0.6B
    for shapes in ([large], [small], [large, small], [large, PartShape(48, 3, 64, torch.float8_e4m3fn)]):
        size = choose_slab_bytes(shapes)
        assert 128 * MIB <= size <= 512 * MIB
        for shape in shapes:
            assert size % shape.num_bytes == 0 and size % shape.block_bytes < 0.02 * size
