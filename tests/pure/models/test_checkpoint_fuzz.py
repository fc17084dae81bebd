"""Files with any bytes in them: an error for users or a model, never a crash, a hang or a great allocation."""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import InputError
from paceline.models.files.folder import TOKENIZER_CONFIG
from paceline.models.files.hf_config import FAMILIES
from paceline.models.files.open import open_checkpoint
from tests.pure.models.made import (
    LLAMA,
    Gguf,
    arrays_for,
    config,
    gguf_fields,
    packed,
    renamed,
    spec_of,
    write_folder,
)

PEAK_BYTES = 64 * 2**20
RELAXED = settings(max_examples=settings().max_examples * 3 // 2, suppress_health_check=list(HealthCheck))


@contextmanager
def only_input_errors() -> Iterator[None]:
    told = ""
    tracemalloc.start()
    try:
        yield
    except InputError as error:
        told = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < PEAK_BYTES and len(told) < 2_000  # a sentence, not the file


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        assert tensor.to_float32().shape == tensor.shape


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, header: int) -> bytes:
    """Some bytes of the header changed, or the end cut off, or both."""
    data = bytearray(whole)
    edits = st.tuples(st.integers(0, header - 1), st.integers(0, 255))
    for place, value in draw(st.lists(edits, max_size=6)):
        data[place] = value
    return bytes(data[: draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))])


SAFETENSORS = packed(arrays_for(spec_of(LLAMA)))
HEADER_BYTES = 8 + int.from_bytes(SAFETENSORS[:8], "little")


@RELAXED
@given(data=damaged(SAFETENSORS, HEADER_BYTES))
def test_damaged_safetensors(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = write_folder(tmp_path_factory.mktemp("fuzz"), LLAMA, {})
    (folder / "model.safetensors").write_bytes(data)
    with only_input_errors():
        read_all(folder)


def gguf_file() -> bytes:
    spec = spec_of(config(tie_word_embeddings=True))
    fields = gguf_fields("llama", spec) | {"tokenizer.ggml.tokens": ["a", "b"], "nested": [[1, 2], [3]]}
    return Gguf(fields=fields, arrays=renamed(arrays_for(spec), spec, interleave=True)).build()


GGUF = gguf_file()
GGUF_HEADER = GGUF.rindex(b"output_norm") + 50


@RELAXED
@given(data=damaged(GGUF, GGUF_HEADER))
def test_damaged_gguf(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    path.write_bytes(data)
    with only_input_errors():
        read_all(path)


@RELAXED
@given(
    rest=st.binary(max_size=300),
    start=st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", b"\x20\0\0\0\0\0\0\0{"]),
)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, start: bytes, rest: bytes) -> None:
    folder = write_folder(tmp_path_factory.mktemp("fuzz"), LLAMA, {})
    for name in ("model.safetensors", "model.gguf", "generation_config.json", TOKENIZER_CONFIG):
        (folder / name).write_bytes(start + rest)
    with only_input_errors():
        read_all(folder)
    with only_input_errors():
        read_all(folder / "model.gguf")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    *LLAMA,
    *("head_dim", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "rope_theta"),
    *(
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "mlp_only_layers",
        "decoder_sparse_step",
    ),
    *(
        "rope_scaling",
        "rope_parameters",
        "hidden_act",
        "tie_word_embeddings",
        "query_pre_attn_scalar",
        "text_config",
    ),
)
SCALING = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])},
    optional={
        name: st.floats() | st.integers() | JSON
        for name in (
            "factor",
            "original_max_position_embeddings",
            "mscale",
            "mscale_all_dim",
            "rope_theta",
            "beta_fast",
        )
    },
)


@RELAXED
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    scaling=st.none() | SCALING,
)
def test_any_config(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    changes: dict[str, Any],
    scaling: dict[str, Any] | None,
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    values = config(family, num_local_experts=2, num_experts_per_tok=1, rope_scaling=scaling) | changes
    (folder / "config.json").write_text(json.dumps(values))
    with only_input_errors():
        open_checkpoint(folder, load_format="dummy")


def test_the_undamaged_files_are_read(tmp_path: Path) -> None:
    """Otherwise the searches above would only see files that are refused at their start."""
    read_all(write_folder(tmp_path, LLAMA))
    (tmp_path / "model.gguf").write_bytes(GGUF)
    read_all(tmp_path / "model.gguf")
