"""Pictures of messages: parts of every API become the same pictures, and what was prepared is kept within bounds."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.config.engine import ModelConfig
from paceline.errors import ConfigError, InvalidImage, InvalidRequest, MediaNotAllowed, UnsupportedModality
from paceline.models.media import pictures as module
from paceline.models.media.picture_settings import PatchSettings
from paceline.models.media.pictures import PictureReader, open_pictures
from paceline.models.media.sources import Picture, take_pictures
from tests.model_folder import write_model
from tests.pictures import encoded, picture
from tests.vision_folder import write_tile_model

DATA = encoded(picture(60, 40))
BASE64 = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{BASE64}"
SETTINGS = PatchSettings(patch=14, merge=2, min_pixels=3136, max_pixels=50_176)


def _take(part: Any, **options: Any) -> Picture:
    messages, found = take_pictures([{"role": "user", "content": [part]}], most=5, **options)
    assert messages[0]["content"] == [{"type": "image", "picture": found[0]}]
    return found[0]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
        {"type": "image", "source": {"type": "url", "url": URL}},
    ],
)
def test_parts_of_every_api(part: Any) -> None:
    assert PictureReader(SETTINGS).open(_take(part)).data == DATA


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.media.pictures.can_decode", lambda: False)
    with pytest.raises(UnsupportedModality, match=r"pip install 'paceline\[vision\]'"):
        PictureReader(SETTINGS).open(_take({"type": "image_url", "image_url": {"url": URL}}))


def test_parts_of_a_program(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(DATA)
    pictures = PictureReader(SETTINGS)
    parts = [
        {"type": "image", "image": picture(60, 40)},
        {"type": "image_pil", "image_pil": picture(60, 40)},
        {"type": "image", "image": DATA},
        {"type": "image", "image": path},
        {"type": "image", "image": str(path)},
        picture(60, 40),
        path,
    ]
    found = [pictures.prepare(pictures.open(_take(part, is_local=True)), "") for part in parts]
    for (item,) in found:
        assert np.array_equal(item.pixels, found[0][0].pixels)
    with pytest.raises(
        InvalidImage, match=r"messages\[0\].content\[0\]: the picture .*cannot be read: No such"
    ):
        pictures.open(_take({"type": "image", "image": "/nothing"}, is_local=True))
    with pytest.raises(InvalidRequest, match="is a picture of Pillow, bytes or a path, not int"):
        _take({"type": "image", "image": 3}, is_local=True)


def test_paths_and_objects_of_a_client_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(DATA)
    for part in ({"type": "image", "image": str(path)}, {"type": "image", "picture": str(path)}):
        with pytest.raises(InvalidRequest, match="must have a source of type base64, url or file"):
            _take(part)


@pytest.mark.parametrize(
    "part, error, words",
    [
        ({"type": "image_url"}, InvalidRequest, "must have an image_url with a url"),
        ({"type": "input_image", "file_id": 3}, InvalidRequest, "must have an image_url or a file_id"),
        ({"type": "image", "source": {"type": "base64"}}, InvalidRequest, "must have media_type and data"),
        ({"type": "image", "source": {"type": "text"}}, InvalidRequest, "of type base64, url or file"),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": "most"}},
            InvalidRequest,
            "detail must be",
        ),
        ({"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}, InvalidImage, "with the type"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}, InvalidImage, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png"}}, InvalidImage, "must be data:"),
        (
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            MediaNotAllowed,
            "must begin with",
        ),
        ({"type": "image_url", "image_url": {"url": "ftp://host/a.png"}}, MediaNotAllowed, "must begin with"),
        ({"type": "image_url", "image_url": {"url": "gopher://host"}}, MediaNotAllowed, "must begin with"),
    ],
)
def test_parts_that_are_wrong(part: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as found:
        _take(part)
    assert "messages[0].content[0]" in str(found.value)


@pytest.mark.parametrize(
    "url, words",
    [
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,####", "not valid base64"),
        (f"data:image/jpeg;base64,{BASE64}", "is image/png, not 'image/jpeg'"),
        ("data:image/png;base64," + "A" * 27_000_000, "at most 20000000"),
    ],
)
def test_pictures_that_are_wrong(url: str, words: str) -> None:
    with pytest.raises(InvalidImage, match=rf"messages\[0\].content\[0\]: the picture .*{words}"):
        PictureReader(SETTINGS).open(_take({"type": "image_url", "image_url": {"url": url}}))


def test_too_many_pictures_are_counted_before_they_are_opened() -> None:
    content = [{"type": "image_url", "image_url": URL}] * 6
    with pytest.raises(InvalidRequest, match="has 6 pictures; at most 5 are accepted"):
        take_pictures([{"role": "user", "content": content}], most=5)


def test_what_was_prepared_is_kept_within_bounds() -> None:
    pictures = PictureReader(SETTINGS, cache_bytes=40_000)
    first = pictures.open(_take({"type": "image_url", "image_url": URL}))
    (item,) = pictures.prepare(first, "a")
    assert pictures.prepare(first, "a")[0] is item
    assert pictures.prepare(first, "b")[0] is not item  # of another tenant
    cache = pictures._cache
    assert (cache.queries, cache.hits) == (3, 1)
    for seed in range(9):
        part = {"type": "image", "image": picture(60, 40, seed=seed)}
        pictures.prepare(pictures.open(_take(part, is_local=True)), "a")
        assert 0 < cache.num_bytes <= 40_000
    assert pictures.prepare(first, "a")[0] is not item
    assert PictureReader(SETTINGS, cache_bytes=10).prepare(first, "a")[0].content == item.content


def test_tenants_share_where_an_operator_says_so() -> None:
    pictures = PictureReader(SETTINGS, shares=True)
    opened = pictures.open(_take({"type": "image_url", "image_url": URL}))
    assert pictures.prepare(opened, "a")[0] is pictures.prepare(opened, "b")[0]


def test_contents_differ_by_all_that_decides_the_pixels() -> None:
    pictures = PictureReader(SETTINGS)
    parts = [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image", "image": picture(60, 40, seed=1)},
        {"type": "image", "image": picture(40, 60)},
    ]
    taken = [_take(part, is_local=True) for part in parts]
    other = PictureReader(PatchSettings(patch=14, merge=2, min_pixels=3136, max_pixels=40_000))
    contents = [pictures.prepare(pictures.open(each), "")[0].content for each in taken]
    contents.append(other.prepare(other.open(taken[0]), "")[0].content)
    assert len(set(contents)) == len(contents)


def test_options(tmp_path: Path) -> None:
    folder = write_tile_model(tmp_path / "sees")
    made = open_pictures(folder, ModelConfig(limit_mm_per_prompt='{"image": 3}', mm_processor_cache_gb=0))
    assert made is not None and made.limit == 3
    text_only = write_model(tmp_path / "text")
    assert open_pictures(text_only, ModelConfig()) is None
    for limit, words in (
        ("3", "must be a JSON object"),
        ('{"video": 1}', "has a number for image, not for 'video'"),
        ('{"image": -1}', "from 0 to"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_pictures(folder, ModelConfig(limit_mm_per_prompt=limit))
    with pytest.raises(ConfigError, match="--mm-processor-kwargs must be a JSON object"):
        open_pictures(folder, ModelConfig(mm_processor_kwargs="{"))
    with pytest.raises(ConfigError, match="reads text only"):
        open_pictures(text_only, ModelConfig(mm_processor_kwargs='{"max_pixels": 9}'))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from([URL, "file_1", "base64"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("type", "image_url", "url", "detail", "source", "data", "media_type", "file_id"),
                    *("image", "picture", "image_pil", "text", "content"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
PART = st.dictionaries(
    st.sampled_from(["image_url", "source", "file_id", "image", "picture", "detail", "image_pil"]),
    JSON,
    max_size=3,
)


@pytest.mark.slow
@given(kind=st.sampled_from(["image_url", "input_image", "image", "image_pil"]), part=PART)
@settings(deadline=None, max_examples=30 * settings().max_examples)
def test_parts_of_any_shape_are_pictures_or_refused(kind: str, part: dict[str, Any]) -> None:
    pictures = PictureReader(SETTINGS)
    try:
        picture = _take({**part, "type": kind})
        if not picture.url and not picture.file_id:
            pictures.open(picture)
    except InvalidRequest as error:
        reason: Exception | None = error
    else:
        reason = None
    assert reason is None or "messages[0].content[0]" in str(reason)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("size", [(1, 1), (1201, 2502), (3, 4000)])
def test_transparency_is_put_on_white_strip_by_strip(mode: str, size: tuple[int, int]) -> None:
    """The same pixels as of the whole picture at once, in a part of the memory."""
    image = picture(*size, mode=mode)
    if mode == "P":
        image.info["transparency"] = 7
    whole = image.convert("RGBA")
    white = Image.new("RGBA", whole.size, (255, 255, 255, 255))
    expected = Image.alpha_composite(white, whole).convert("RGB")
    made: list[int] = []
    composite = Image.alpha_composite

    def noted(below: Image.Image, above: Image.Image) -> Image.Image:
        made.append(above.width * above.height)
        return composite(below, above)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "alpha_composite", noted)
        found = module.rgb(image)
    assert found.tobytes() == expected.tobytes()
    assert sum(made) == size[0] * size[1] and max(made) <= module.STRIP_PIXELS
