"""How a model wants its pictures, as its files say: preprocessor_config.json, processor_config.json, config.json.

A family is one of two ways to bring a picture to an encoder: tiles of one size with the whole picture behind them
(Idefics3, SmolVLM), or patches of a picture of about its own size (Qwen-VL). Where a file says nothing, the values are
those of the family's processor in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.models.files.config_fields import CheckpointError, Fields, shown
from paceline.models.files.folder import ModelFolder

BICUBIC, LANCZOS = 3, 1  # as Pillow numbers its filters
MAX_FILTER = 5
MAX_TILE = 4096  # pixels of a side, of a tile or of a picture before it is cut
LOW_PIXELS = 512 * 512  # of a picture that is asked for with little detail


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSettings:
    """Idefics3, SmolVLM."""

    longest: int  # pixels of the longer side, before the picture is cut
    tile: int  # pixels of a side of a tile
    patch: int
    outputs: int  # vectors of a tile
    splits: bool = True  # False: the whole picture is the only tile
    resizes: bool = True
    resample: int = LANCZOS

    def low(self) -> TileSettings:
        """For a picture of which little detail is wanted."""
        return replace(self, splits=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSettings:
    """Qwen2-VL and its followers."""

    patch: int
    merge: int  # patches to a side of what becomes one vector
    min_pixels: int
    max_pixels: int
    resample: int = BICUBIC

    def low(self) -> PatchSettings:
        return replace(self, max_pixels=max(self.min_pixels, min(self.max_pixels, LOW_PIXELS)))


MediaSettings = TileSettings | PatchSettings

_TILES = ("idefics3", "smolvlm")
_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# What an operator may set: fields of preprocessor_config.json.
CHANGEABLE = ("do_image_splitting", "max_image_size", "size", "min_pixels", "max_pixels")


def media_settings(folder: ModelFolder, changes: Mapping[str, object] | None = None) -> MediaSettings | None:
    """None: the model reads text only. `changes`: --mm-processor-kwargs."""
    config = Fields(folder.config, str(folder.path / "config.json"))
    family = config.get("model_type")
    if family not in _TILES and family not in _PATCHES:
        return None
    processor = folder.json("processor_config.json") or {}
    written = folder.json("preprocessor_config.json")
    if written is None:  # newer files have it inside
        inside = processor.get("image_processor")
        written = dict(inside) if isinstance(inside, Mapping) else {}
    where = str(folder.path / "preprocessor_config.json")
    for name in changes or {}:
        if name not in CHANGEABLE:
            message = (
                f"mm_processor_kwargs: {name} cannot be set; settings of pictures: {', '.join(CHANGEABLE)}"
            )
            raise ConfigError(message)
    try:
        fields = Fields({**written, **(changes or {})}, where)
        if family in _TILES:
            return _tiles(config, fields, Fields(processor, str(folder.path / "processor_config.json")))
        return _patches(config, fields, is_newest=family == "qwen3_vl", changed=changes or {})
    except CheckpointError as error:
        if changes:
            raise ConfigError(f"mm_processor_kwargs do not fit this model: {error}") from None
        raise


def _tiles(config: Fields, fields: Fields, processor: Fields) -> TileSettings:
    vision = config.group("vision_config") or Fields({}, config.where)
    patch = vision.integer("patch_size", 32, maximum=MAX_TILE)
    side = vision.integer("image_size", 224, maximum=MAX_TILE)
    scale = config.integer("scale_factor", 2, maximum=64)
    tile = _edge(fields, "max_image_size", side)
    outputs = (tile // patch) ** 2 // scale**2
    written = processor.optional_integer("image_seq_len")
    if written is not None and written != outputs:
        raise CheckpointError(
            f"{processor.where}: image_seq_len is {written}, but config.json makes {outputs} vectors of a tile"
        )
    if outputs < 1:
        raise CheckpointError(f"{config.where}: a tile of {tile} pixels makes no vector")
    return TileSettings(
        longest=_edge(fields, "size", 4 * tile),
        tile=tile,
        patch=patch,
        outputs=outputs,
        splits=fields.flag("do_image_splitting", True),
        resizes=fields.flag("do_resize", True),
        resample=_filter(fields, LANCZOS),
    )


def _edge(fields: Fields, name: str, default: int) -> int:
    group = fields.group(name)
    return default if group is None else group.integer("longest_edge", maximum=MAX_TILE * 4)


def _patches(
    config: Fields, fields: Fields, *, is_newest: bool, changed: Mapping[str, object]
) -> PatchSettings:
    vision = config.group("vision_config") or Fields({}, config.where)
    own_patch, own_merge = (
        vision.optional_integer("patch_size"),
        vision.optional_integer("spatial_merge_size"),
    )
    patch = fields.integer("patch_size", own_patch or (16 if is_newest else 14), maximum=256)
    merge = fields.integer("merge_size", own_merge or 2, maximum=16)
    for name, value, own in (("patch_size", patch, own_patch), ("merge_size", merge, own_merge)):
        if own is not None and value != own:
            message = f"{fields.where}: {name} is {value}, but the encoder in config.json has {own}"
            raise CheckpointError(message)
    if not fields.flag("do_resize", True):
        raise CheckpointError(f"{fields.where}: do_resize must be true, not {shown(False)}")
    least, most = 56 * 56, 28 * 28 * 1280
    size = fields.group("size")
    if size is not None:
        least = size.integer("shortest_edge", least)
        most = size.integer("longest_edge", most)
    if size is None or "size" not in changed:  # the older way to write the same, which goes first
        least = fields.integer("min_pixels", least)
        most = fields.integer("max_pixels", most)
    if most < max(least, (patch * merge) ** 2):
        raise CheckpointError(f"{fields.where}: max_pixels is {most}, less than the smallest picture has")
    return PatchSettings(
        patch=patch, merge=merge, min_pixels=least, max_pixels=most, resample=_filter(fields, BICUBIC)
    )


def _filter(fields: Fields, default: int) -> int:
    return fields.integer("resample", default, minimum=0, maximum=MAX_FILTER)
