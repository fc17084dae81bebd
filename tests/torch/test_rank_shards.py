"""Models cut into ranks compute what they compute whole; see `ranks_in_threads`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.files.stored import num_parameters
from paceline.models.load import DenseStorage, build_decoder
from paceline.runner.parallel.shards import ShardedSource, check_size, cut, possible_sizes
from paceline.text.tokenizer import Tokenizer
from tests.bits import Circumstances, Record, differences
from tests.bits import record as record_with
from tests.torch.bits import record
from tests.torch.english_prompts import PROMPTS as ENGLISH
from tests.torch.gguf_reference import smollm2_path
from tests.torch.parity import MAX_LEN, make_prompts
from tests.torch.ranks_in_threads import Ranks
from tests.torch.tiny_models import save

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "mixtral", "qwen3_moe")
NEAR, MARGIN = 2e-5, 1e-3  # of the largest logit; between the two best
NUM_NEW = 12
PLAIN = Circumstances()
OTHER = (
    Circumstances(alone=True, budget=16),
    Circumstances(preempt="recompute", block_size=8, caching=True),
    Circumstances(preempt="swap", budget=33),
    Circumstances(fork=True, caching=True),
)
PROMPTS = make_prompts()[:6]


@cache
def checkpoint_of(architecture: str) -> Checkpoint:
    folder = TemporaryDirectory()
    _kept.append(folder)
    save(architecture, Path(folder.name))
    return open_checkpoint(folder.name)


_kept: list[TemporaryDirectory[str]] = []


@cache
def ranks_of(architecture: str, size: int) -> Ranks:
    return Ranks(checkpoint_of(architecture), size, MAX_LEN + 1)


def ranked(ranks: Ranks, around: Circumstances, prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> Record:
    spec = ranks.whole.spec
    return record_with(ranks.step, spec, prompts, around, num_new=NUM_NEW, num_blocks=200)


def check_near(whole: Record, parts: Record) -> int:
    """Logits behind the same tokens are near, and so is the best token where it is clear. Returns how many were."""
    common = whole.bits.keys() & parts.bits.keys()
    assert len(common) > 10 * len(whole.outputs)
    clear = 0
    for key in common:
        one, other = (np.frombuffer(each.bits[key], np.float32) for each in (whole, parts))
        assert np.abs(one - other).max() <= NEAR * np.abs(one).max()
        second, first = np.sort(one)[-2:]
        if first - second > MARGIN:
            clear += 1
            assert int(one.argmax()) == int(other.argmax())
    return clear


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_compute_what_one_does(architecture: str) -> None:
    whole = record(build_decoder(checkpoint_of(architecture), MAX_LEN + 1), PROMPTS, PLAIN, num_new=NUM_NEW)
    assert check_near(whole, ranked(ranks_of(architecture, 2), PLAIN)) > 10


@pytest.mark.parametrize("around", OTHER, ids=str)
@pytest.mark.parametrize("architecture", ["mixtral"])
def test_at_two_ranks_bits_do_not_depend_on_what_happens_around(
    architecture: str, around: Circumstances
) -> None:
    plain, other = (ranked(ranks_of(architecture, 2), each) for each in (PLAIN, around))
    assert differences(plain, other) == []
    assert not around.preempt or other.preempted > 5
    assert not around.fork or other.forked


@pytest.mark.campaign
@pytest.mark.parametrize("around", OTHER, ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bits_of_every_architecture(architecture: str, size: int, around: Circumstances) -> None:
    plain, other = (ranked(ranks_of(architecture, size), each) for each in (PLAIN, around))
    assert differences(plain, other) == []


def test_ranks_share_heads_of_keys_where_there_are_fewer() -> None:
    """Four ranks, two heads of keys and values."""
    whole = record(build_decoder(checkpoint_of("qwen3"), MAX_LEN + 1), PROMPTS, PLAIN, num_new=NUM_NEW)
    ranks = ranks_of("qwen3", 4)
    assert [decoder.spec.num_kv_heads for decoder in ranks.decoders] == [1] * 4
    check_near(whole, ranked(ranks, PLAIN))


def test_each_rank_holds_its_part_alone() -> None:
    checkpoint = checkpoint_of("llama")
    spec = checkpoint.spec
    parts = [ShardedSource(checkpoint, rank, 2) for rank in range(2)]
    held = [sum(int(np.prod(part.tensor(name).shape)) for name in part.names()) for part in parts]
    alone = spec.vocab_size * spec.hidden_size + (2 * spec.num_layers + 1) * spec.hidden_size
    assert held == [alone + (num_parameters(spec) - alone) // 2] * 2


def test_made_up_weights_are_the_same_model_at_any_size(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    checkpoint = open_checkpoint(tmp_path, load_format="dummy")
    name = "model.layers.1.mlp.down_proj.weight"
    parts = [ShardedSource(checkpoint, rank, 4).tensor(name).to_float32() for rank in range(4)]
    assert np.array_equal(np.concatenate(parts, axis=1), checkpoint.tensor(name).to_float32())


@pytest.mark.parametrize(("size", "named"), [(3, "4 attention heads"), (8, "4 attention heads")])
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(size: int, named: str) -> None:
    checkpoint = checkpoint_of("llama")
    assert possible_sizes(checkpoint.spec, checkpoint) == (1, 2, 4)
    with pytest.raises(ConfigError, match=f"{named}.*can have 1, 2, 4"):
        check_size(checkpoint.spec, checkpoint, size)


# -- SmolLM2: quantised, nine heads --------------------------------------------------------------------------

SMOLLM2 = smollm2_path()
has_smollm2 = pytest.mark.skipif(
    SMOLLM2 is None or not SMOLLM2.exists(), reason="SmolLM2 is not on this machine"
)


@has_smollm2
def test_quantised_matrices_are_cut_at_their_blocks() -> None:
    assert SMOLLM2 is not None
    checkpoint = open_checkpoint(SMOLLM2)
    assert possible_sizes(checkpoint.spec, checkpoint) == (1, 3)
    for end, axis in (
        ("self_attn.o_proj", 1),
        ("mlp.down_proj", 1),
        ("mlp.up_proj", 0),
        ("self_attn.q_proj", 0),
    ):
        name = f"model.layers.7.{end}.weight"
        whole = checkpoint.tensor(name)
        parts = [ShardedSource(checkpoint, rank, 3).tensor(name) for rank in range(3)]
        assert all(part.dtype == whole.dtype and 3 * len(part.raw) == len(whole.raw) for part in parts)
        joined = np.concatenate([part.to_float32() for part in parts], axis=axis)
        assert np.array_equal(joined, whole.to_float32())
    with pytest.raises(AssertionError):
        cut(checkpoint.tensor("model.layers.7.mlp.down_proj.weight"), 1, 16, 64)


@has_smollm2
@pytest.mark.campaign
def test_smollm2_on_three_ranks() -> None:
    assert SMOLLM2 is not None
    checkpoint = open_checkpoint(SMOLLM2)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    prompts = tuple(tuple(tokenizer.encode(text)) for text in ENGLISH[:5])
    decoder = build_decoder(checkpoint, 256, DenseStorage())
    whole = record(decoder, prompts, PLAIN, num_new=NUM_NEW)
    ranks = Ranks(checkpoint, 3, 256)
    plain = ranked(ranks, PLAIN, prompts)
    assert check_near(whole, plain) > 25
    for around in (OTHER[0], OTHER[2]):
        assert differences(plain, ranked(ranks, around, prompts)) == []
