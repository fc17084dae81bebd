"""Each kernel against the same arithmetic in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.runner.native.arena import kinds_of, pack
from paceline.runner.native.checks import aligned
from paceline.runner.native.code import Code
from paceline.runner.native.layout import (
    GELU,
    GELU_TANH,
    INPUT_SCALES,
    Q4_UNPACKED,
    Q8,
    Q8_FINE,
    QUANTISED,
    SILU,
    SUB_BLOCK,
    kv_head_bytes,
    panel_bytes,
)
from tests.native.matrices import TYPES, Floats, group_scales, stored

ROWS = (1, 2, 3, 4, 5, 8, 9)


def address(values: NDArray[np.generic]) -> int:
    return values.ctypes.data


def arguments(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


class Product:
    """A matrix as panels and inputs as tiles; `run` gives [rows, outputs].

    `alone`: no matrix of the model has 4 bits.
    """

    def __init__(
        self,
        code: Code,
        dtype: str,
        outputs: int,
        inputs: int,
        seed: int = 0,
        quantization: str = "auto",
        *,
        alone: bool = False,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.tensor = stored(rng.normal(0, 0.1, (outputs, inputs)).astype(np.float32), dtype)
        others = [] if alone else [stored(np.zeros((16, 32), np.float32), "Q4_0", "other")]
        self.kind = kinds_of([self.tensor, *others], quantization)[self.tensor.name]
        self.input_bytes = 2 if self.kind == Q8_FINE else 1
        panels = -(-outputs // 16)
        self.packed = aligned(panels * panel_bytes(self.kind, inputs))
        pack(self.tensor, self.kind, self.packed)
        self.code, self.outputs, self.inputs, self.panels = code, outputs, inputs, panels

    def run(self, x: Floats) -> Floats:
        rows = len(x)
        tiles = -(-rows // 4)
        quantised, scales = (
            aligned(tiles * 4 * self.inputs * self.input_bytes),
            aligned(tiles * 4 * self.inputs // 32 * INPUT_SCALES),
        )
        if self.kind in QUANTISED:
            for row in range(rows):
                given = (
                    address(x[row]),
                    row,
                    self.inputs,
                    0,
                    self.inputs,
                    address(quantised),
                    address(scales),
                    self.input_bytes,
                )
                self.code.probe("quantise", arguments(*given))
        out = np.full((rows, self.panels * 16), np.nan, np.float32)
        unpacked = aligned(self.inputs // 32 * Q4_UNPACKED + 64)
        where = (self.kind, address(self.packed), address(x), address(quantised), address(scales))
        size = (rows, self.inputs, address(out), self.panels * 64, address(unpacked), self.panels)
        self.code.probe("panel", arguments(*where, *size))
        return out[:, : self.outputs]

    def expected(self, x: Floats) -> NDArray[np.float64]:
        weights = self.tensor.to_float32().astype(np.float64)
        if self.kind in (Q8, Q8_FINE) and self.tensor.dtype != "Q8_0":
            weights = _rounded_to_bytes(weights)
        if self.tensor.dtype == "Q4_K":
            weights = _half_scales(self.packed, self.outputs, self.inputs)
        if self.kind not in QUANTISED:
            return x.astype(np.float64) @ weights.T
        q, scale = group_scales(x, self.input_bytes)
        rounded = (q * scale[..., None]).reshape(x.shape)
        found: NDArray[np.float64] = rounded @ weights.T
        return found


def _rounded_to_bytes(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    grouped = weights.reshape(len(weights), -1, 32)
    scale = (np.abs(grouped).max(axis=-1).astype(np.float32) / 127).astype(np.float16).astype(np.float64)
    q = np.rint(np.divide(grouped, scale[..., None], out=np.zeros_like(grouped), where=scale[..., None] > 0))
    found: NDArray[np.float64] = (q.clip(-127, 127) * scale[..., None]).reshape(weights.shape)
    return found


def _half_scales(packed: NDArray[np.uint8], outputs: int, inputs: int) -> NDArray[np.float64]:
    """The weights that stand in 4-bit panels."""
    groups = packed.reshape(-1, inputs // 32, 320)
    words = groups[:, :, :256].reshape(-1, inputs // 32, 4, 16, 4)
    low, high = words & 15, words >> 4
    q = np.concatenate([low, high], axis=2).transpose(0, 3, 1, 2, 4).reshape(-1, inputs // 32, 32)
    halves = groups[:, :, 256:].view(np.float16).astype(np.float64)
    scale, offset = (
        halves[:, :, at : at + 16].transpose(0, 2, 1).reshape(-1, inputs // 32, 1) for at in (0, 16)
    )
    return (q * scale + offset).reshape(-1, inputs)[:outputs]


@pytest.mark.parametrize(
    "dtype, alone", [*((dtype, False) for dtype in TYPES), ("Q8_0", True), ("Q5_1", True)]
)
@pytest.mark.parametrize("shape", [(16, 256), (48, 512), (40, 768)])
def test_a_product_is_the_one_of_its_panels(
    code: Code, dtype: str, alone: bool, shape: tuple[int, int]
) -> None:
    product = Product(code, dtype, *shape, alone=alone)
    rng = np.random.default_rng(1)
    first: Floats | None = None
    for rows in ROWS:
        x = rng.normal(0, 1, (rows, shape[1])).astype(np.float32)
        x[0] = np.sin(np.arange(shape[1]))
        found, expected = product.run(x), product.expected(x)
        np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(np.abs(expected).max())))
        first = found[0] if first is None else first
        assert np.array_equal(found[0], first), f"a row's numbers depend on the {rows - 1} beside it"


@pytest.mark.parametrize("dtype, alone", [("Q4_1", False), ("Q8_0", False), ("Q8_0", True), ("F32", False)])
def test_the_plain_path_gives_the_same_bits(code: Code, plain: Code, dtype: str, alone: bool) -> None:
    x = np.random.default_rng(2).normal(0, 1, (9, 256)).astype(np.float32)
    found = [Product(kernels, dtype, 32, 256, alone=alone).run(x) for kernels in (code, plain)]
    assert np.array_equal(found[0], found[1])


def test_a_model_of_eight_bits_alone_has_finer_inputs(code: Code) -> None:
    """A row's numbers are some hundred times as near to those of inputs that are not rounded."""
    x = np.random.default_rng(4).normal(0, 1, (8, 768)).astype(np.float32)
    off = []
    for alone in (False, True):
        product = Product(code, "Q8_0", 64, 768, alone=alone)
        exact = x.astype(np.float64) @ product.tensor.to_float32().astype(np.float64).T
        off.append(float(np.abs(product.run(x) - exact).max()))
    assert off[1] < off[0] / 100


def test_a_panels_unused_columns_stay_zero(code: Code) -> None:
    product = Product(code, "Q4_1", 20, 256)
    assert _half_scales(product.packed, 32, 256)[20:].any() == np.False_


def test_inputs_that_are_not_finite_make_products_that_are_not(code: Code) -> None:
    product = Product(code, "Q4_1", 16, 256)
    for bad in (np.nan, np.inf):
        x = np.ones((2, 256), np.float32)
        x[1, 70] = bad
        found = product.run(x)
        assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).any()


def test_exp_is_within_two_units_of_the_last_place(code: Code) -> None:
    x = np.concatenate([np.linspace(-90, 88, 4080), [0.0, -0.0, -87.0, -87.01, 88.0, 120.0, -np.inf, np.nan]])
    x = np.pad(x.astype(np.float32), (0, -len(x) % 16))
    out = np.empty_like(x)
    code.probe("exp", arguments(len(x), address(x), address(out)))
    inside = (x >= -87) & (x <= 88)
    exact = np.exp(x[inside].astype(np.float64))
    assert np.max(np.abs(out[inside] - exact) / exact) < 2.5e-7
    assert (out[x < -87] == 0).all() and np.isnan(out[np.isnan(x)]).all()


@pytest.mark.parametrize("count", [32, 64, 576, 1536])
def test_norm(code: Code, count: int) -> None:
    rng = np.random.default_rng(count)
    x, weight = (rng.normal(0, 2, count).astype(np.float32) for _ in range(2))
    out = np.empty_like(x)
    code.probe("norm", arguments(address(x), count, address(weight), bits(1e-5), address(out)))
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean() + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [SILU, GELU_TANH, GELU])
def test_activations(code: Code, kind: int) -> None:
    gate = np.concatenate([np.linspace(-100, 100, 250), [-1e30, 1e30, np.nan, 0, -0.0, 1]]).astype(np.float32)
    up, out = np.full_like(gate, 0.5), np.empty_like(gate)
    code.probe("activate", arguments(kind, len(gate), address(gate), address(up), address(out)))
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        if kind == SILU:
            expected = wide / (1 + np.exp(-wide)) / 2
        elif kind == GELU:
            expected = np.array([0.25 * x * (1 + math.erf(x / math.sqrt(2))) for x in wide.tolist()])
            # Of large negative numbers the error function is 1 but for its last bits.
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-6)
            return
        else:
            expected = wide / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) / 2
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("half", [4, 8, 16, 32, 36, 40, 48])
def test_rotation(code: Code, half: int) -> None:
    rng = np.random.default_rng(half)
    head = rng.normal(0, 1, 2 * half).astype(np.float32)
    angle = rng.uniform(0, 7, half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    before = head.astype(np.float64)
    code.probe("rotate", arguments(address(head), half, address(cos), address(sin)))
    a, b = before[:half], before[half:]
    np.testing.assert_allclose(head, np.concatenate([a * cos - b * sin, b * cos + a * sin]), atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_embedding_of_a_token_is_its_row(code: Code, dtype: str) -> None:
    product = Product(code, dtype, 40, 256)
    weights = product.tensor.to_float32().astype(np.float64)
    if dtype == "Q4_K":
        weights = _half_scales(product.packed, 40, 256)
    elif product.kind == Q8 and dtype != "Q8_0":
        weights = _rounded_to_bytes(weights)
    for token in (0, 15, 16, 39):
        out = np.empty(256, np.float32)
        code.probe("embed", arguments(product.kind, address(product.packed), token, 256, address(out)))
        np.testing.assert_allclose(out, weights[token], rtol=1e-6, atol=1e-7)


class Paged:
    """Tokens in sub-blocks at shuffled places; what was not kept is NaN, also as a scale."""

    def __init__(self, code: Code, dim: int, subs: int, *, in_bytes: bool) -> None:
        self.code, self.dim, self.subs, self.in_bytes = code, dim, subs, in_bytes
        self.size = kv_head_bytes(dim, in_bytes=in_bytes)
        self.order = np.random.default_rng(dim).permutation(np.arange(1, 8))
        self.kv = np.full(8 * subs * self.size // 4, np.nan, np.float32).view(np.uint8).reshape(-1, self.size)

    def keep(self, token: int, key: Floats, value: Floats) -> None:
        block, place = divmod(token, SUB_BLOCK * self.subs)
        sub, lane = divmod(place, SUB_BLOCK)
        entry, dim = self.kv[self.order[block] * self.subs + sub], self.dim
        if not self.in_bytes:
            floats = entry.view(np.float32)
            floats[: dim * 16].reshape(dim, 16)[:, lane] = key
            floats[dim * 16 :].reshape(16, dim)[lane] = value
            return
        at, scale = address(entry), address(entry) + 32 * dim + 4 * lane
        self.code.probe("keep_bytes", arguments(address(key), dim, at + 4 * lane, 64, scale))
        self.code.probe("keep_bytes", arguments(address(value), dim, at + (16 + lane) * dim, 4, scale + 64))

    def attend(self, queries: Floats, first: NDArray[np.int64], end: NDArray[np.int64]) -> Floats:
        table, step = self.order.astype(np.int64), (8 * SUB_BLOCK * self.subs + 32) * 4
        scores, x, out = aligned(4 * step), aligned(6 * self.dim), np.empty_like(queries)
        where = (address(queries), address(first), address(end), address(table), self.subs, address(self.kv))
        more = (self.size, self.dim, address(scores), step, address(out), int(self.in_bytes), address(x))
        self.code.probe("attend", arguments(len(queries), *where, *more))
        return out


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row to bytes and back."""
    scale = np.abs(values).max(axis=-1, keepdims=True) / 127
    found: NDArray[np.float64] = np.rint(values / np.where(scale > 0, scale, 1.0)) * scale
    return found


@pytest.mark.parametrize(
    "dim, in_bytes", [(16, False), (64, False), (96, False), (32, True), (64, True), (96, True)]
)
@pytest.mark.parametrize("subs", [1, 2])
def test_attention_sees_what_it_may_and_nothing_else(code: Code, dim: int, subs: int, in_bytes: bool) -> None:
    """Tokens that no query may see hold NaN; those that another query may see hold anything finite."""
    rng = np.random.default_rng(dim)
    length = 7 * SUB_BLOCK * subs
    paged = Paged(code, dim, subs, in_bytes=in_bytes)
    keys, values = (rng.normal(0, 1, (length, dim)).astype(np.float32) for _ in range(2))
    low, high = 21, length - 5
    for token in range(low, high):
        paged.keep(token, keys[token], values[token])
    first, end = np.array([low, 40, low, 33]), np.array([high, 41, 60, high])
    queries = rng.normal(0, 1, (4, dim)).astype(np.float32)
    k, v, q = (tensor.astype(np.float64) for tensor in (keys, values, queries))
    if in_bytes:
        k, v, q = _rounded(k), _rounded(v), _rounded(q.reshape(4, -1, 32)).reshape(4, dim)
    alone: list[Floats] = []
    for rows in (1, 2, 3, 4):
        parts = [slice(start, start + rows) for start in range(0, 4, rows)]
        out = np.concatenate([paged.attend(queries[part], first[part], end[part]) for part in parts])
        for row in range(4):
            span = slice(first[row], end[row])
            weight = np.exp(k[span] @ q[row])
            np.testing.assert_allclose(out[row], weight @ v[span] / weight.sum(), rtol=2e-4, atol=2e-5)
        alone.append(out)
        assert np.array_equal(out, alone[0]), "a query's result depends on the ones beside it"


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_a_token_is_kept_as_bytes_and_a_scale(code: Code, plain: Code, dim: int) -> None:
    values = np.random.default_rng(dim).normal(0, 3, dim).astype(np.float32)
    values[5] = -np.abs(values).max() * 1.5
    for source in (values, np.zeros(dim, np.float32)):
        kept = []
        for kernels in (code, plain):
            quads, scale = np.full((dim // 4, 5, 4), 7, np.int8), np.empty(1, np.float32)
            where = arguments(address(source), dim, address(quads) + 4, 20, address(scale))
            kernels.probe("keep_bytes", where)
            kept.append((quads, scale))
            assert (quads[:, [0, 2, 3, 4]] == 7).all(), "others' places are touched"
            wide = source.astype(np.float64)
            np.testing.assert_allclose(quads[:, 1].ravel() * float(scale[0]), _rounded(wide), atol=1e-5)
            assert scale[0] == np.float32(np.abs(source).max()) / np.float32(127)
        assert np.array_equal(kept[0][0], kept[1][0]) and kept[0][1] == kept[1][1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_shows_in_its_scale(code: Code, bad: float) -> None:
    values, quads, scale = np.ones(32, np.float32), np.zeros(32, np.int8), np.zeros(1, np.float32)
    values[9] = bad
    code.probe("keep_bytes", arguments(address(values), 32, address(quads), 4, address(scale)))
    assert not np.isfinite(scale[0])


def test_bytes_give_the_same_bits_on_the_plain_path(code: Code, plain: Code) -> None:
    rng, found = np.random.default_rng(3), []
    keys, values, queries = (rng.normal(0, 1, (count, 64)).astype(np.float32) for count in (100, 100, 3))
    for kernels in (code, plain):
        paged = Paged(kernels, 64, 1, in_bytes=True)
        for token in range(100):
            paged.keep(token, keys[token], values[token])
        found.append(paged.attend(queries, np.zeros(3, np.int64), np.array([100, 99, 98])))
    first, second = found
    assert np.array_equal(first, second)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("quantization, steps", [("int4", 15), ("int8", 254)])
def test_floats_are_quantised_while_loading(code: Code, dtype: str, quantization: str, steps: int) -> None:
    """A one picks a column of weights: each is within half a step of its group, and a step is as small as can be."""
    product = Product(code, dtype, 40, 64, quantization=quantization)
    found = product.run(np.eye(64, dtype=np.float32)).T
    weights = product.tensor.to_float32()
    grouped = weights.reshape(40, 2, 32)
    reach = np.ptp(grouped, axis=-1) if steps == 15 else 2 * np.abs(grouped).max(axis=-1)
    apart = np.abs(found - weights).reshape(40, 2, 32)
    assert (apart <= reach[:, :, None] / steps * 0.505 + 1e-4).all()
    assert apart.max() > 0
    # Twice the steps would be closer than this.
    assert np.median(apart.max(axis=-1) / reach * steps) > 0.4
