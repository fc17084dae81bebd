"""The safetensors reader: right values from right files, and a sentence for every way a file can be wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.safetensors import SafetensorsFile, SafetensorsFiles
from tests.pure.models.made import packed, safetensors


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    return path


def one(dtype: str = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict[str, object]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_float32_is_a_view_of_the_file(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    # The header is padded to 8 bytes as writers do, so that the values lie at an even address.
    header = json.dumps(one()).encode()
    file = SafetensorsFile(write(tmp_path, safetensors(header + b" " * (-len(header) % 8), values.tobytes())))
    tensor = file.tensor("w")
    found = tensor.to_float32()
    assert np.array_equal(found, values) and np.shares_memory(found, tensor.raw)
    assert not found.flags.writeable and tensor.raw.ndim == 1


def test_float32_at_an_odd_address_is_copied(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = json.dumps(one()).encode()
    file = SafetensorsFile(
        write(tmp_path, safetensors(header + b" " * (-len(header) % 8 + 1), values.tobytes()))
    )
    found = file.tensor("w").to_float32()
    assert np.array_equal(found, values) and found.flags.aligned


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 3.140625, float("inf"), 1e-30])
def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path: Path, value: float) -> None:
    upper = (np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    found = SafetensorsFile(write(tmp_path, packed({"w": upper}, "BF16"))).tensor("w").to_float32()
    assert found.dtype == np.float32 and np.array_equal(found.view(np.uint32) >> 16, upper)
    assert found[0] == pytest.approx(value, rel=1e-2)


@pytest.mark.parametrize("dtype, kind", [("F16", np.float16), ("F64", np.float64)])
def test_other_floats_become_float32(tmp_path: Path, dtype: str, kind: Any) -> None:
    values = np.array([[0.5, -1.25], [3.0, 1024.0]], kind)
    found = SafetensorsFile(write(tmp_path, packed({"w": values}, dtype))).tensor("w").to_float32()
    assert found.dtype == np.float32 and np.array_equal(found, values)


def test_an_integer_tensor_is_listed_but_is_no_weight(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path, packed({"w": np.zeros(3, np.int64)}, "I64")))
    assert file.entries["w"].dtype == "I64"
    with pytest.raises(CheckpointError, match="w is of type I64; weights must be one of F32"):
        file.tensor("w")


def test_tensors_may_lie_in_any_order_and_be_empty(tmp_path: Path) -> None:
    header = {
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        "empty": {"dtype": "F32", "shape": [0, 5], "data_offsets": [4, 4]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    file = SafetensorsFile(write(tmp_path, safetensors(header, np.array([7, 8], np.float32).tobytes())))
    assert file.tensor("a").to_float32() == 7 and file.tensor("b").to_float32() == 8
    assert file.tensor("empty").to_float32().shape == (0, 5)


TWO = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
}
FAULTS = {
    "is empty": b"",
    "too short to be a safetensors file": b"\x01\0\0",
    "claims a header of 1000 bytes but is only": safetensors({}, length=1000),
    "this is not a safetensors file": safetensors({}, length=2**40),
    "not valid JSON": safetensors(b"{'a': 1}"),
    "must hold a JSON object": safetensors([1, 2]),
    "is nested too deeply": safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "the key 'w' occurs twice": safetensors(b'{"w": {}, "w": {}}'),
    "the type 'F7' is not known": safetensors(one("F7"), bytes(24)),
    "the header must hold an object": safetensors({"w": 3}),
    "shape must be a list of whole numbers": safetensors(one(shape=[2, -3]), bytes(24)),
    "data_offsets must be a list of whole": safetensors(one(offsets=[0, "24"]), bytes(24)),
    "shape or offsets that cannot be": safetensors(one(offsets=[24, 0]), bytes(24)),
    "holds 24 bytes, which is not what F32 of shape": safetensors(one(shape=[2, 4]), bytes(24)),
    "ends at byte": safetensors(one(), bytes(20)),
    "bytes behind its last tensor": safetensors(one(), bytes(30)),
    "'b' overlaps what lies before it": safetensors(
        {**TWO, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)
    ),
    "'b' leaves a hole before it": safetensors(
        {**TWO, "b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}}, bytes(20)
    ),
    "more than 30 digits": safetensors(one(shape=[10**20, 10**20]), bytes(24)),
}


@pytest.mark.parametrize("told", FAULTS)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, told: str) -> None:
    path = write(tmp_path, FAULTS[told])
    if told == "more than 30 digits":  # in a value that is shown: the header itself has no such limit
        told = "which is not what"
    with pytest.raises(CheckpointError, match=told) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = packed({"a": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float32)})
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            SafetensorsFile(write(tmp_path, whole[:length]))
    SafetensorsFile(write(tmp_path, whole))


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFile(tmp_path)


def test_shards_are_read_by_the_index(tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    first.write_bytes(packed({"a": np.array([1], np.float32), "unlisted": np.zeros(1, np.float32)}))
    second.write_bytes(packed({"b": np.array([2, 2], np.float32)}))
    files = SafetensorsFiles({"a": first, "b": second}, "index")
    assert files.tensor("b").to_float32().tolist() == [2, 2]
    found = {
        name: (entry.shape, entry.dtype, entry.end - entry.begin) for name, entry in files.entries.items()
    }
    assert found == {"a": ((1,), "F32", 4), "b": ((2,), "F32", 8)}
    with pytest.raises(CheckpointError, match="index: 1 tensors are not in the file named for them: c"):
        SafetensorsFiles({"a": first, "c": second}, "index")
