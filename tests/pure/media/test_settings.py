"""How a model wants its pictures is read from its folder, and changed only where that fits its encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.folder import ModelFolder
from paceline.models.media.picture_settings import PatchSettings, TileSettings, media_settings
from paceline.models.media.sizes import media_size

SMOLVLM = {
    "model_type": "idefics3",
    "scale_factor": 4,
    "vision_config": {"image_size": 512, "patch_size": 16},
}
QWEN = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}


def _read(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any] | None = None, **files: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return media_settings(ModelFolder(tmp_path), changes)


def test_text_models_have_none(tmp_path: Path) -> None:
    assert _read(tmp_path, {"model_type": "llama"}) is None


def test_smolvlm_as_its_files_have_it(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        SMOLVLM,
        preprocessor_config={
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
            "resample": 1,
        },
        processor_config={"image_seq_len": 64},
    )
    assert found == TileSettings(longest=2048, tile=512, patch=16, outputs=64)
    assert media_size(640, 480, found).items == 13  # 4 x 3 tiles and the whole


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    assert _read(tmp_path, SMOLVLM) == TileSettings(longest=2048, tile=512, patch=16, outputs=64)


def test_settings_inside_the_processor_file(tmp_path: Path) -> None:
    inside = {"image_processor": {"size": {"longest_edge": 1024}}, "image_seq_len": 64}
    assert _read(tmp_path, SMOLVLM, processor_config=inside).longest == 1024


def test_qwen_in_both_ways_of_writing(tmp_path: Path) -> None:
    older = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
    found = _read(tmp_path, QWEN, preprocessor_config=older)
    assert found == PatchSettings(patch=14, merge=2, min_pixels=3136, max_pixels=12845056)
    newer = {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}
    assert _read(tmp_path, QWEN, preprocessor_config=newer) == found
    for changes in ({"max_pixels": 50_176}, {"size": {"shortest_edge": 3136, "longest_edge": 50_176}}):
        assert _read(tmp_path, QWEN, changes, preprocessor_config=older).max_pixels == 50_176


def test_changes_of_an_operator(tmp_path: Path) -> None:
    assert not _read(tmp_path, SMOLVLM, {"do_image_splitting": False}).splits
    assert _read(tmp_path, SMOLVLM, {"size": {"longest_edge": 1024}}).longest == 1024
    with pytest.raises(ConfigError, match="image_mean cannot be set; settings of pictures: do_image"):
        _read(tmp_path, SMOLVLM, {"image_mean": [0, 0, 0]})
    seq_len = {"image_seq_len": 64}
    with pytest.raises(ConfigError, match="do not fit this model: .*image_seq_len is 64, but .* 36"):
        _read(tmp_path, SMOLVLM, {"max_image_size": {"longest_edge": 384}}, processor_config=seq_len)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match="must be true or false"):
        _read(tmp_path, SMOLVLM, {"do_image_splitting": "no"})


def test_files_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="image_seq_len is 81, but config.json makes 64"):
        _read(tmp_path, SMOLVLM, processor_config={"image_seq_len": 81})
    with pytest.raises(CheckpointError, match="patch_size is 16, but the encoder in config.json has 14"):
        _read(tmp_path, QWEN, preprocessor_config={"patch_size": 16})


def test_little_detail_costs_little() -> None:
    tiles = TileSettings(longest=2048, tile=512, patch=16, outputs=64)
    assert media_size(2000, 1500, tiles.low()).outputs == 64
    patches = PatchSettings(patch=14, merge=2, min_pixels=3136, max_pixels=12845056)
    assert media_size(2000, 1500, patches.low()).outputs <= 512 * 512 // 28**2
