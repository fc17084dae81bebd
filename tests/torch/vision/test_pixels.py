"""Pixels and sizes equal those of the processors in transformers that use Pillow, byte for byte after resizing."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from paceline.errors import InvalidImage
from paceline.models.media.headers import read_header
from paceline.models.media.picture_settings import MediaSettings, PatchSettings, TileSettings
from paceline.models.media.pictures import decode, item_pixels
from paceline.models.media.sizes import media_size
from tests.pictures import sixty

TILES = [
    TileSettings(longest=1456, tile=364, patch=14, outputs=169),  # Idefics3
    TileSettings(longest=2048, tile=512, patch=16, outputs=64),  # SmolVLM
    TileSettings(longest=300, tile=512, patch=16, outputs=64),
    TileSettings(longest=2048, tile=512, patch=16, outputs=64, splits=False),
]
PATCHES = [
    PatchSettings(patch=14, merge=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280),  # Qwen2.5-VL
    PatchSettings(patch=16, merge=2, min_pixels=65_536, max_pixels=262_144),  # Qwen3-VL, with a smaller limit
]


def _reference(data: bytes) -> Image.Image:
    """As transformers loads a picture; sixteen bits of grey, which Pillow cuts off at 255, lose their lower ones."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    if image.mode == "I;16":
        return Image.fromarray((np.array(image) // 256).astype(np.uint8))
    return image


def _ours(data: bytes, settings: MediaSettings) -> tuple[Any, list[np.ndarray]]:
    header = read_header(data)
    size = media_size(*header.shown, settings)
    return size, item_pixels(decode(data, header), size, settings)


def test_there_are_sixty_pictures() -> None:
    assert len(sixty()) == 60


def shares(settings: Sequence[MediaSettings]) -> list[Any]:
    """Settings with the pictures to see with them: in `make test` every picture with one of them, in the campaign with
    each."""
    count = len(settings)
    return [
        pytest.param(each, slice(place, None, count), id=named(each)) for place, each in enumerate(settings)
    ] + [
        pytest.param(each, slice(None), id=f"{named(each)} all", marks=pytest.mark.campaign)
        for each in settings
    ]


def named(settings: MediaSettings) -> str:
    if isinstance(settings, TileSettings):
        return f"{settings.longest}-{settings.tile}-{settings.splits}"
    return str(settings.patch)


@pytest.mark.parametrize("settings, share", shares(TILES))
def test_tiles_are_those_of_idefics3_and_smolvlm(settings: TileSettings, share: slice) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kind = Idefics3ImageProcessorPil if settings.tile == 364 else SmolVLMImageProcessorPil
    processor = kind(
        size={"longest_edge": settings.longest},
        max_image_size={"longest_edge": settings.tile},
        do_image_splitting=settings.splits,
        return_row_col_info=True,
        do_rescale=False,
        do_normalize=False,
    )
    for name, data in sixty()[share]:
        expected = processor(_reference(data), return_tensors="np")
        size, pixels = _ours(data, settings)
        assert [[size.rows]] == expected["rows"] and [[size.columns]] == expected["cols"], name
        tiles = expected["pixel_values"][0].transpose(0, 2, 3, 1)
        assert len(pixels) == size.items == len(tiles), name
        for ours, theirs in zip(pixels, tiles, strict=True):
            assert ours.dtype == np.uint8 and ours.shape == (1, settings.tile, settings.tile, 3)
            assert np.array_equal(ours[0], theirs), name


@pytest.mark.parametrize("settings, share", shares(PATCHES))
def test_patches_are_those_of_qwen(settings: PatchSettings, share: slice) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        patch_size=settings.patch,
        merge_size=settings.merge,
        do_rescale=False,
        do_normalize=False,
    )
    for name, data in sixty()[share]:
        expected = processor(_reference(data), return_tensors="np")
        size, (pixels,) = _ours(data, settings)
        assert size.grid == tuple(expected["image_grid_thw"][0]), name
        assert size.item_units == len(pixels) and size.outputs * settings.merge**2 == len(pixels)
        frames = expected["pixel_values"].reshape(len(pixels), 3, 2, -1)
        assert np.array_equal(pixels.reshape(len(pixels), 3, -1), frames[:, :, 0]), name
        assert np.array_equal(frames[:, :, 0], frames[:, :, 1])


def test_sizes_alone_are_those_of_transformers() -> None:
    """All sides up to 64 and many beyond: no pixel is needed to know what a picture costs."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    random = np.random.default_rng(3)
    sides = [*np.ndindex(64, 64), *random.integers(0, 5000, (3000, 2))]
    for width, height in ((int(first) + 1, int(second) + 1) for first, second in sides):
        for settings in PATCHES:
            factor = settings.patch * settings.merge
            limits = (settings.min_pixels, settings.max_pixels)
            if max(width, height) > 200 * min(width, height):
                with pytest.raises(InvalidImage, match="200:1"):
                    media_size(width, height, settings)
                continue
            size = media_size(width, height, settings)
            assert (size.height, size.width) == smart_resize(height, width, factor, *limits)
    processor = Idefics3ImageProcessorPil()
    for width, height in random.integers(1, 5000, (3000, 2)).tolist():
        size = media_size(width, height, TILES[0])
        patches, rows, columns = processor.get_number_of_image_patches(height, width)
        # The processor's own count forgets that a picture may be one tile high and wide.
        assert (size.rows, size.columns) == (rows, columns), (width, height)
        assert not patches or size.items == patches
