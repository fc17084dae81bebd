"""The pictures of one model's prompts: opened by their headers, prepared for its encoder, kept for the next time.

`open` says what a picture costs before a pixel is decoded; `prepare` decodes and resizes it, in any thread. What was
prepared is kept in bounded memory, per tenant: a picture that comes again is not decoded again.

Transparency stands on white, turned pictures are turned, of an animation the first frame is taken, sixteen bits lose
their lower eight. Tiles and patches are equal to those of the processors of transformers that use Pillow, byte for
byte, up to their normalisation, which is the encoder's. Pillow does the work, without Python's lock; it comes with the
extra `vision` and is imported when the first picture is decoded. Its own words never reach a client.
"""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import ModelConfig
from paceline.core.stretch import MediaInput, MediaPart
from paceline.errors import ConfigError, InvalidImage, UnsupportedModality
from paceline.models.files.folder import ModelFolder
from paceline.models.media.headers import FORMATS, Header, check_sides, check_type, read_header
from paceline.models.media.picture_settings import MediaSettings, PatchSettings, TileSettings, media_settings
from paceline.models.media.sizes import MediaSize, first_size, media_size
from paceline.models.media.sources import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

DIGEST_BYTES = 32
DEFAULT_LIMIT = 20  # pictures of a prompt
MOST = 1000
DEFAULT_CACHE_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenPicture:
    """A picture whose header was read."""

    picture: Picture
    settings: MediaSettings
    size: MediaSize
    data: bytes = b""
    header: Header | None = None  # None: it is a picture of Pillow


class PictureReader:
    """Opens and prepares the pictures of one model's prompts."""

    def __init__(
        self,
        settings: MediaSettings,
        *,
        limit: int = DEFAULT_LIMIT,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        shares: bool = False,
    ) -> None:
        """`shares`: tenants use what was prepared for others."""
        self.settings = settings
        self.limit = limit
        self._shares = shares
        self._cache = PreparedCache(cache_bytes)

    def open(self, picture: Picture) -> OpenPicture:
        """Raises InvalidImage that names the picture's place; UnsupportedModality without the extra `vision`."""
        check_installed()
        settings = self.settings.low() if picture.low else self.settings
        try:
            if picture.image is not None:
                width, height = picture.image.size
                check_sides(width, height)
                size = media_size(width, height, settings)
                return OpenPicture(picture=picture, settings=settings, size=size)
            data = picture.read()
            header = read_header(data)
            if picture.declared is not None:
                check_type(header, picture.declared)
            size = media_size(*header.shown, settings)
        except InvalidImage as error:
            raise _placed(error, picture) from None
        return OpenPicture(picture=picture, settings=settings, size=size, data=data, header=header)

    def named(self, opened: OpenPicture) -> tuple[MediaInput, ...]:
        """The items of a picture, by what they are and without pixels."""
        image = None if opened.picture.image is None else rgb(opened.picture.image)
        content, size = _digest(opened, image), opened.size
        return tuple([_item(content, index, size, np.zeros(0, np.uint8)) for index in range(size.items)])

    def prepare(self, opened: OpenPicture, tenant: str) -> tuple[MediaInput, ...]:
        """The items of a picture. Raises InvalidImage for one that cannot be decoded."""
        image = None if opened.picture.image is None else rgb(opened.picture.image)
        content = _digest(opened, image)
        key = ("" if self._shares else tenant, content)
        found = self._cache.get(key)
        if found is not None:
            return found
        try:
            if image is None:
                assert opened.header is not None
                image = decode(opened.data, opened.header)
        except InvalidImage as error:
            raise _placed(error, opened.picture) from None
        size = opened.size
        pixels = enumerate(item_pixels(image, size, opened.settings))
        items = tuple([_item(content, index, size, each) for index, each in pixels])
        self._cache.put(key, items)
        return items


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedPicture:
    """A picture of a prompt, and where the vectors of each of its items begin."""

    opened: OpenPicture
    starts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.opened.size.outputs

    def lean(self) -> PlacedPicture:
        """Its place and size, without its file."""
        kept = replace(self.opened, picture=Picture(self.opened.picture.place), data=b"")
        return replace(self, opened=kept)

    def parts(self, items: Sequence[MediaInput]) -> list[MediaPart]:
        return [MediaPart(start, given) for start, given in zip(self.starts, items, strict=True)]


def open_pictures(path: Path, model: ModelConfig) -> PictureReader | None:
    """The reader of a model that sees; None for one that reads text only. Raises ConfigError for wrong options."""
    limits = _mapping(model.limit_mm_per_prompt, "limit-mm-per-prompt")
    limit = limits.pop("image", DEFAULT_LIMIT)
    if limits:
        name = sorted(limits)[0]
        raise ConfigError(f"--limit-mm-per-prompt has a number for image, not for {name!r:.40}")
    if not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= MOST:
        raise ConfigError(
            f"--limit-mm-per-prompt: image must be a number from 0 to {MOST}, not {limit!r:.40}"
        )
    changes = _mapping(model.mm_processor_kwargs, "mm-processor-kwargs")
    settings = media_settings(ModelFolder(path), changes) if path.is_dir() else None
    if settings is None:
        if changes:
            raise ConfigError(
                "--mm-processor-kwargs is for models that see pictures; this one reads text only"
            )
        return None
    cache_bytes = int(model.mm_processor_cache_gb * 2**30)
    return PictureReader(settings, limit=limit, cache_bytes=cache_bytes, shares=model.share_media_cache)


def _mapping(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise ConfigError(f"--{name} must be a JSON object, not {text!r:.60}")
    return dict(found)


class PreparedCache:
    """Prepared pictures, the least recently used evicted first. Used from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._entries: OrderedDict[tuple[str, bytes], tuple[MediaInput, ...]] = OrderedDict()
        self.num_bytes = 0
        self.queries = self.hits = 0

    def get(self, key: tuple[str, bytes]) -> tuple[MediaInput, ...] | None:
        with self._lock:
            self.queries += 1
            found = self._entries.get(key)
            if found is not None:
                self.hits += 1
                self._entries.move_to_end(key)
            return found

    def put(self, key: tuple[str, bytes], items: tuple[MediaInput, ...]) -> None:
        size = _num_bytes(items)
        if size > self._max_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = items
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self.num_bytes -= _num_bytes(dropped)


def _num_bytes(items: Sequence[MediaInput]) -> int:
    return sum(item.pixels.nbytes for item in items)


def _item(content: bytes, index: int, size: MediaSize, pixels: Any) -> MediaInput:
    return MediaInput(
        content=content + index.to_bytes(2, "little"),
        units=size.item_units,
        outputs=size.item_outputs,
        pixels=pixels,
        grid=size.grid,
    )


def _digest(opened: OpenPicture, image: Any) -> bytes:
    """Of all that decides the pixels an encoder gets. Engines key it by tenant."""
    hashed = blake2b(repr((opened.settings, opened.size)).encode(), digest_size=DIGEST_BYTES)
    if image is None:
        assert opened.header is not None
        hashed.update(repr(opened.header).encode() + b"\0")
        hashed.update(opened.data)
    else:
        hashed.update(f"pixels {image.size}\0".encode())
        hashed.update(image.tobytes())
    return hashed.digest()


def _placed(error: InvalidImage, picture: Picture) -> InvalidImage:
    return InvalidImage(f"{picture.place}: {error}", param=error.param or "messages")


# From a file to pixels in red, green and blue, eight bits each, and from these to what an encoder takes.


STRIP_PIXELS = 1_000_000
MISSING = "pictures need the extra vision, which is not installed here: pip install 'paceline[vision]'"
# How to turn a picture by its orientation in EXIF, in the words of Pillow.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


@cache
def can_decode() -> bool:
    return importlib.util.find_spec("PIL") is not None


def check_installed() -> None:
    """Raises UnsupportedModality without the extra that decodes pictures."""
    if not can_decode():
        raise UnsupportedModality(MISSING, param="messages")


def decode(data: bytes, header: Header) -> Image:
    """Raises InvalidImage for what cannot be decoded, or is not what its header says."""
    check_installed()
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            if image.size == (header.width, header.height):
                image.load()
                found = rgb(image)
                turn = _TURNS.get(header.orientation)
                return found if turn is None else found.transpose(Image.Transpose[turn])
    except MemoryError:
        raise
    except Exception:  # decoders fail in any way, and with any words
        raise InvalidImage("the picture cannot be decoded: its file is damaged or cut short") from None
    raise InvalidImage("the picture has another size than its header says")


def rgb(image: Image) -> Image:
    """Any picture in red, green and blue, on white where it is transparent."""
    from PIL import Image as images

    if image.mode.startswith("I"):
        image = images.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image) -> Image:
    """In strips: of a large picture every copy is hundreds of megabytes."""
    from PIL import Image as images

    found = images.new("RGB", image.size)
    high = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, high):
        strip = image.crop((0, top, image.width, min(top + high, image.height))).convert("RGBA")
        white = images.new("RGBA", strip.size, (255, 255, 255, 255))
        found.paste(images.alpha_composite(white, strip).convert("RGB"), (0, top))
    return found


Pixels = NDArray[np.uint8]


def item_pixels(image: Image, size: MediaSize, settings: MediaSettings) -> list[Pixels]:
    """The pixels of each item of a picture in red, green and blue; see `MediaInput` for their order."""
    if isinstance(settings, TileSettings):
        return _tiles(image, size, settings)
    return [_patches(image, size, settings)]


def _tiles(image: Image, size: MediaSize, settings: TileSettings) -> list[Pixels]:
    tile = settings.tile
    image = _resized(image, first_size(image.width, image.height, settings), settings.resample)
    image = _resized(image, (size.width, size.height), settings.resample)
    whole = np.asarray(_resized(image, (tile, tile), settings.resample))
    pixels = np.asarray(image)
    found = [
        pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
        for row in range(size.rows)
        for column in range(size.columns)
    ]
    return [np.ascontiguousarray(each)[None] for each in (*found, whole)]


def _patches(image: Image, size: MediaSize, settings: PatchSettings) -> Pixels:
    patch, merge = settings.patch, settings.merge
    _, rows, columns = size.grid
    pixels = np.asarray(_resized(image, (size.width, size.height), settings.resample))
    cut = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    # Squares that are merged row by row, in each the patches row by row, in each channel, row, column.
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, -1)


def _resized(image: Image, size: tuple[int, int], resample: int) -> Image:
    return image if image.size == size else image.resize(size, resample=resample)
