"""Keys and values of tokens that were computed elsewhere: copied to their place, keys turned by the difference.

Rotations add up, so that a key of position p that is turned by s is the key of position p + s, whatever the frequencies
are, as long as they do not depend on the length of the sequence.
"""

from __future__ import annotations

from paceline.runner.native import layout as at
from paceline.runner.native.kernels.emit import apart, kernel
from paceline.runner.native.kernels.scalars import fma_one, get_float, get_int, put_float
from paceline.runner.native.kernels.simd import load_floats, store_floats


@kernel
def _turn_keys(source, target, count, dim, half, cos, sin):
    """Keys of neighbours: entry by entry, because a line of the cache has one entry of all tokens of a sub-block."""
    for i in range(half):
        c, s = get_float(cos + 4 * i), get_float(sin + 4 * i)
        first, second = 64 * i, 64 * (half + i)
        for token in range(0, 4 * count, 4):
            a, b = get_float(source + first + token), get_float(source + second + token)
            put_float(target + first + token, a * c - b * s)
            put_float(target + second + token, fma_one(a, s, b * c))
    for line in range(128 * half, 64 * dim, 64):
        for token in range(0, 4 * count, 4):
            put_float(target + line + token, get_float(source + line + token))


@kernel
def _copy_values(source, target, count, dim):
    for offset in range(0, 4 * count * dim, 64):
        store_floats(target + offset, load_floats(source + offset))


@kernel
def _place_neighbours(a, layer, source, target, count):
    """All heads of tokens that lie side by side in one sub-block, and will in another."""
    heads, dim = get_int(a + at.R_KV_HEADS), get_int(a + at.R_HEAD_DIM)
    block_bytes, half = get_int(a + at.R_BLOCK_BYTES), get_int(a + at.R_ROTARY_DIM) // 2
    kv, cos, sin = get_int(layer + at.R_KV), get_int(layer + at.R_COS), get_int(layer + at.R_SIN)
    old, new = source % at.SUB_BLOCK, target % at.SUB_BLOCK
    read = kv + source // at.SUB_BLOCK * block_bytes
    write = kv + target // at.SUB_BLOCK * block_bytes
    for _ in range(heads):
        _turn_keys(read + 4 * old, write + 4 * new, count, dim, half, cos, sin)
        values = 64 * dim
        _copy_values(read + values + 4 * old * dim, write + values + 4 * new * dim, count, dim)
        read += block_bytes // heads
        write += block_bytes // heads


@apart
def place(a, _):
    """Tokens that follow each other, from the slots of one list to those of another, in all layers of a table."""
    count, sources, targets = get_int(a + at.R_COUNT), get_int(a + at.R_SOURCES), get_int(a + at.R_TARGETS)
    for index in range(get_int(a + at.R_NUM_LAYERS)):
        layer, token = get_int(a + at.R_LAYERS) + index * at.PLACED_LAYER_BYTES, 0
        while token < count:
            source, target = get_int(sources + 8 * token), get_int(targets + 8 * token)
            left = min(at.SUB_BLOCK - source % at.SUB_BLOCK, at.SUB_BLOCK - target % at.SUB_BLOCK)
            neighbours = min(left, count - token)
            _place_neighbours(a, layer, source, target, neighbours)
            token += neighbours
