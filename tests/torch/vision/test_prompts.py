"""Prompts with pictures have the tokens that transformers' processors make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from paceline.config.engine import ModelConfig
from paceline.llm.prompts import ChatPrompts
from paceline.models.media.pictures import PictureReader, open_pictures
from paceline.text.tokenizer import Tokenizer
from tests.pictures import picture
from tests.vision_folder import write_deep_model, write_patch_model, write_tile_model

ONE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is <this>?"}]}]
TWO = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "text", "text": "First "}, {"type": "image"}, {"type": "image"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Two\n"}]},
    {"role": "user", "content": [{"type": "text", "text": "\nand"}, {"type": "image"}]},
]
SIZES = ((64, 32), (300, 200), (40, 90), (32, 32), (500, 30), (8, 8), (128, 128))


def tile_processor(folder: Path) -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil.from_pretrained(folder)
    text = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return transformers.Idefics3Processor(images, text, image_seq_len=4, chat_template=text.chat_template)


def patch_processor(folder: Path) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    text = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    processor = transformers.Qwen2_5_VLProcessor.__new__(transformers.Qwen2_5_VLProcessor)
    processor.image_token = "<|image_pad|>"
    processor.image_processor, processor.tokenizer, processor.chat_template = images, text, text.chat_template
    return processor


def expected_ids(processor: Any, messages: Any, images: list[Any]) -> list[int]:
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    made = dict(processor.image_processor([images], return_tensors="np", **_wanted(processor)))
    for index in range(len(images)):
        text = text.replace(
            processor.image_token, "\0" + processor.replace_image_token(made, index).replace("<", "\1"), 1
        )
    ids = processor.tokenizer(text.replace("\0", "").replace("\1", "<"), add_special_tokens=False)[
        "input_ids"
    ]
    return list(ids)


def _wanted(processor: Any) -> dict[str, Any]:
    return {"return_row_col_info": True} if hasattr(processor, "image_seq_len") else {}


WRITERS = {"tiles": write_tile_model, "patches": write_patch_model, "deep": write_deep_model}


@pytest.fixture(params=list(WRITERS))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, ChatPrompts, PictureReader]:
    folder = WRITERS[request.param](tmp_path)
    pictures = open_pictures(folder, ModelConfig(model=str(folder)))
    assert pictures is not None
    ours = ChatPrompts(Tokenizer.from_folder(folder), pictures=pictures)
    return (tile_processor if request.param == "tiles" else patch_processor)(folder), ours, pictures


def _with(messages: Any, images: list[Any]) -> Any:
    left = iter(images)
    return [
        {
            **message,
            "content": [
                {"type": "image", "image": next(left)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


@pytest.mark.parametrize("messages", [ONE, TWO], ids=["one", "three"])
def test_ids_are_those_of_transformers(family: Any, messages: Any) -> None:
    processor, ours, pictures = family
    count = sum(part["type"] == "image" for message in messages for part in message["content"])
    for first in range(len(SIZES)):
        images = [picture(*SIZES[(first + index) % len(SIZES)]) for index in range(count)]
        rendered = ours.render(_with(messages, images), is_local=True)
        assert rendered.ids == expected_ids(processor, messages, images)
        _check_places(rendered, pictures, processor.tokenizer.convert_tokens_to_ids(processor.image_token))


def _check_places(rendered: Any, pictures: PictureReader, mark: int) -> None:
    """Each vector has its token, and nothing else has one."""
    places: list[int] = []
    for placed in rendered.pictures:
        items = pictures.prepare(placed.opened, "")
        for start, given in placed.parts(items):
            assert given.units == np.prod(given.grid) and given.pixels.dtype == np.uint8
            places += range(start, start + given.outputs)
    assert places == [index for index, token in enumerate(rendered.ids) if token == mark]


def test_text_that_spells_marks_is_text(family: Any) -> None:
    _, ours, _ = family
    spelled = "<image><|image_pad|><fake_token_around_image><global-img><row_1_col_1><|vision_start|>"
    content = [{"type": "image", "image": picture(64, 32)}, {"type": "text", "text": spelled}]
    rendered = ours.render([{"role": "user", "content": content}], is_local=True)
    plain = ours.render([{"role": "user", "content": content[:1]}], is_local=True)
    # Every token of this vocabulary is a character or a mark.
    assert len(rendered.ids) - len(plain.ids) == len(spelled)
    assert len(rendered.pictures) == 1
