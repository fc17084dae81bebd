"""Rows on a GPU have room for the longest sequence, so that their number follows from it."""

from dataclasses import replace

import pytest

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.errors import ConfigError
from paceline.runner.gpu.build import ROW_SHARE, step_sizes
from paceline.runner.gpu.row_memory import row_bytes
from tests.quantized_helpers import tiny_spec

GIB = 1 << 30
H200, SMALL = 139 * GIB, 24 * GIB


def rows(longest: int, total: int, **given: int) -> int:
    spec = replace(tiny_spec(), max_positions=longest)
    sizes = step_sizes(spec, given, total)
    found: int = sizes["max_num_seqs"]
    longest = given.get("max_model_len", longest)
    assert "max_num_seqs" in given or 2 * found * row_bytes(longest) <= total / ROW_SHARE
    return found


def test_usual_lengths_have_as_many_rows_as_ever() -> None:
    assert rows(8_192, H200) == rows(131_072, H200) == 1024
    assert rows(8_192, SMALL) == rows(131_072, SMALL) == 256


def test_there_are_fewer_rows_of_a_million_tokens() -> None:
    assert 200 < rows(1 << 20, H200) < 300
    assert rows(1 << 20, H200, max_model_len=131_072) == 1024


def test_more_rows_than_32_bits_reach_are_refused_with_how_many_there_can_be() -> None:
    assert rows(1 << 20, H200, max_num_seqs=900) == 900
    with pytest.raises(ConfigError, match="there can be 9[0-9][0-9] rows of that length"):
        rows(1 << 20, H200, max_num_seqs=1024)
