"""The GGUF container: fields of every type, tensors of every type, and a sentence for every broken header."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.gguf import FLOATS, NOT_WEIGHTS, TYPES, GgufFile
from tests.pure.models.made import ARRAY, F32, STRING, UINT8, UINT32, Gguf, entry, text


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def test_a_file_written_by_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    scalars: dict[str, tuple[str, object]] = {
        "u8": ("add_uint8", 200),
        "i8": ("add_int8", -100),
        "u16": ("add_uint16", 60_000),
        "i16": ("add_int16", -30_000),
        "u32": ("add_uint32", 2**32 - 1),
        "i32": ("add_int32", -(2**31)),
        "u64": ("add_uint64", 2**64 - 1),
        "i64": ("add_int64", -(2**63)),
        "f32": ("add_float32", 0.5),
        "f64": ("add_float64", 0.1),
        "yes": ("add_bool", True),
        "text": ("add_string", "grüße"),
    }
    for name, (method, value) in scalars.items():
        getattr(writer, method)(name, value)
    writer.add_array("words", ["a", "", "ü" * 300])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("halves", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    matrix = np.arange(24, dtype=np.float32).reshape(4, 6)
    writer.add_tensor("matrix", matrix)
    quantised = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    packed = gguf.quants.quantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantised", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("half", matrix.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile(path)
    for name, (_, value) in scalars.items():
        assert file.fields[name] == value and type(file.fields[name]) is type(value), name
    assert file.fields["words"] == ["a", "", "ü" * 300] and file.fields["numbers"] == [1, -2, 3]
    assert file.fields["halves"] == [0.5, 1.5] and file.fields["flags"] == [True, False]
    assert np.array_equal(file.tensor("matrix").to_float32(), matrix)
    assert np.array_equal(file.tensor("half").to_float32(), matrix)
    found = file.tensor("quantised")
    assert found.dtype == "Q8_0" and found.shape == (3, 64) and found.raw.size == 3 * 2 * 34
    assert np.array_equal(found.to_float32(), gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
    assert np.allclose(found.to_float32(), quantised, atol=0.02)
    half = file.entries["half"]
    assert (half.dtype, half.end - half.begin) == ("F16", 48)


def test_the_table_of_types_is_the_gguf_packages() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {number: (kind.name, kind.block, kind.block_bytes) for number, kind in TYPES.items()}
    assert theirs.items() <= ours.items()


@pytest.mark.parametrize("number", [n for n, kind in TYPES.items() if kind.name not in NOT_WEIGHTS])
def test_every_type_that_can_be_a_weight_is_decoded(tmp_path: Path, number: int) -> None:
    kind = TYPES[number]
    columns = 256
    num_bytes = 2 * columns // kind.block * kind.block_bytes
    head = Gguf(table=[entry("w", (columns, 2), number, 0)]).build()
    # Zero bytes are zero in some types and not in others; only the shape and the road are looked at here.
    file = GgufFile(write(tmp_path, head + bytes(num_bytes)))
    tensor = file.tensor("w")
    assert tensor.dtype == kind.name and tensor.raw.size == num_bytes
    values = tensor.to_float32()
    assert values.shape == (2, columns) and values.dtype == np.float32
    assert (kind.name not in FLOATS) or not values.any()


@pytest.mark.parametrize("number", [n for n, kind in TYPES.items() if kind.name in NOT_WEIGHTS])
def test_types_that_cannot_be_weights_are_named(tmp_path: Path, number: int) -> None:
    file = GgufFile(write(tmp_path, Gguf(table=[entry("w", (256,), number, 0)]).build() + bytes(4096)))
    with pytest.raises(
        CheckpointError, match=f"w is of type {TYPES[number].name}, which weights cannot have"
    ):
        file.tensor("w")


def test_nested_arrays_and_version_2(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2B", UINT8, 2, 7, 8)
    field = (
        text("nested")
        + struct.pack("<IIQ", ARRAY, ARRAY, 2)
        + inner
        + struct.pack("<IQ", STRING, 1)
        + text("x")
    )
    file = GgufFile(write(tmp_path, Gguf(raw_fields=[field], version=2).build()))
    assert file.fields == {"nested": [[7, 8], ["x"]]}


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    arrays = {"a": np.ones(3, np.float32), "b": np.full(2, 2, np.float32)}
    data = Gguf(fields={"general.alignment": 64}, arrays=arrays, alignment=64).build()
    file = GgufFile(write(tmp_path, data))
    assert file.tensor("b").to_float32().tolist() == [2, 2] and file.entries["b"].begin % 64 == 0


def deep(levels: int) -> bytes:
    return text("deep") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * levels


def string_array(count: int, *strings: bytes) -> bytes:
    return text("words") + struct.pack("<IIQ", ARRAY, STRING, count) + b"".join(strings)


HUGE = 2**63
FAULTS = {
    "is not a GGUF file": b"GGML" + bytes(20),
    "is GGUF version 1; supported are 2 and 3": Gguf(version=1).build(),
    "is a big-endian GGUF file": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "ends within its header": b"GGUF\3\0\0\0",
    f"claims {HUGE} tensors and 0 fields": Gguf(num_tensors=HUGE).build(),
    f"claims 0 tensors and {HUGE} fields": Gguf(num_fields=HUGE).build(),
    "a value has the unknown type 99": Gguf(raw_fields=[text("a") + struct.pack("<II", 99, 0)]).build(),
    "ends within a string": Gguf(raw_fields=[struct.pack("<Q", HUGE) + bytes(40)]).build(),
    "is not UTF-8": Gguf(raw_fields=[text("a") + struct.pack("<I", STRING) + text(b"\xff\xfe")]).build(),
    "the field 'a' occurs twice": Gguf(raw_fields=[text("a") + struct.pack("<II", UINT32, 1)] * 2).build(),
    "an array claims": Gguf(raw_fields=[text("a") + struct.pack("<IIQ", ARRAY, UINT8, HUGE)]).build(),
    "ends within an array of strings": Gguf(raw_fields=[string_array(1_000_000, text("x"))]).build(),
    "elements of the unknown type 77": Gguf(
        raw_fields=[text("a") + struct.pack("<IIQ", ARRAY, 77, 1)]
    ).build(),
    "nested more than 4 deep": Gguf(raw_fields=[deep(5_000)]).build(),
    "ends within an array of arrays": Gguf(raw_fields=[deep(1) + struct.pack("<IQ", ARRAY, 999)]).build(),
    "claims 1000 bytes, beyond": Gguf(
        raw_fields=[string_array(2, text("x"), struct.pack("<Q", 1000))]
    ).build(),
    "a string at byte .* is not UTF-8": Gguf(raw_fields=[string_array(1, text(b"\xff"))]).build(),
    "the tensor 'a' occurs twice": Gguf(table=[entry("a", (1,), F32, 0)] * 2).build() + bytes(64),
    "claims 0 dimensions": Gguf(table=[entry("a", (), F32, 0)]).build() + bytes(64),
    "claims 5 dimensions": Gguf(table=[entry("a", (1,) * 5, F32, 0)]).build() + bytes(64),
    "has type number 36, which is not known; known are F32": Gguf(table=[entry("a", (32,), 36, 0)]).build(),
    "of type Q8_0 has the impossible shape": Gguf(table=[entry("a", (33,), 8, 0)]).build() + bytes(64),
    "impossible shape .0.": Gguf(table=[entry("a", (0,), F32, 0)]).build() + bytes(64),
    "beyond the end of the file": Gguf(table=[entry("a", (17,), F32, 0)]).build() + bytes(64),
    "at offset 4, which is not a multiple of 32": Gguf(table=[entry("a", (1,), F32, 4)]).build() + bytes(64),
    "at offset 9223372036854775808": Gguf(table=[entry("a", (1,), F32, HUGE)]).build() + bytes(64),
    "beyond the end of the file;": Gguf(table=[entry("a", (HUGE, HUGE), F32, 0)]).build() + bytes(64),
    "'b' overlaps the tensor before it": Gguf(
        table=[entry("a", (9,), F32, 0), entry("b", (1,), F32, 32)]
    ).build()
    + bytes(64),
    "general.alignment must be a multiple of 8": Gguf(fields={"general.alignment": 7}).build(),
}


@pytest.mark.parametrize("told", FAULTS)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, told: str) -> None:
    path = write(tmp_path, FAULTS[told])
    with pytest.raises(CheckpointError, match=told) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    fields = {"text": "words", "list": ["a", "b"], "flag": True, "n": [1, 2, 3]}
    whole = Gguf(fields=fields, arrays={"a": np.ones((2, 3), np.float32)}).build()
    whole = whole[: len(whole) - 8]  # without the padding behind the last tensor
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            GgufFile(write(tmp_path, whole[:length]))
    GgufFile(write(tmp_path, whole))


@pytest.mark.parametrize("number", [n for n, kind in TYPES.items() if kind.name not in NOT_WEIGHTS])
def test_any_bytes_decode_as_the_gguf_package_says(tmp_path: Path, number: int) -> None:
    kind = TYPES[number]
    data = np.random.default_rng(number).integers(0, 256, 3 * 512 // kind.block * kind.block_bytes, np.uint8)
    head = Gguf(table=[entry("w", (512, 3), number, 0)]).build()
    found = GgufFile(write(tmp_path, head + data.tobytes())).tensor("w").to_float32()
    if kind.name == "F64":  # which the package leaves alone
        with np.errstate(all="ignore"):
            expected = data.view(np.float64).astype(np.float32)
    else:
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(data.reshape(3, -1), gguf.GGMLQuantizationType(number))
    assert np.array_equal(found, expected.reshape(3, 512), equal_nan=True)
