"""Conversations with pictures from the file to the answer, against transformers with its own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, SamplingParams
from tests.pictures import encoded, picture, turned
from tests.torch.vision.test_prompts import WRITERS, expected_ids, patch_processor, tile_processor

NUM_TOKENS = 24
QUESTION = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module", params=list(WRITERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose answers depend on its pictures."""
    found = WRITERS[request.param](tmp_path_factory.mktemp(request.param))
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(found)
    config.text_config.initializer_range = config.vision_config.initializer_range = 0.2
    settings = (found / "config.json").read_bytes()
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        model.get_output_embeddings().weight[config.image_token_id] = 0  # no answer spells a picture
    model.save_pretrained(found)
    (found / "config.json").write_bytes(settings)
    return found


def _expected(folder: Path, images: list[Any]) -> list[int]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    messages = [{"role": "user", "content": [*({"type": "image"} for _ in images), QUESTION]}]
    if model.config.model_type == "idefics3":
        processor = tile_processor(folder)
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        given = processor(text=text, images=[images], return_tensors="pt", add_special_tokens=False)
    else:
        processor = patch_processor(folder)
        ids = torch.tensor([expected_ids(processor, messages, images)])
        is_mark = (ids == model.config.image_token_id).int()
        given = {
            **processor.image_processor([images], return_tensors="pt"),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": is_mark,
        }
    model.generation_config.eos_token_id = None  # generate to the end, as ignore_eos does
    made = model.generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False)
    return [int(token) for token in made[0, given["input_ids"].shape[1] :]]


def test_answers_are_those_of_transformers(folder: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    images = [picture(300, 200), picture(64, 64, "RGBA", seed=1), picture(40, 200, "P", seed=2)]
    chosen = [[images[0]], [images[1]], images[1:], images]
    with LLM(str(folder), num_blocks=600, check_every=1) as llm:
        found = []
        for each in chosen:
            content = [*({"type": "image", "image": encoded(image)} for image in each), QUESTION]
            (output,) = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
            found.append(output.outputs[0].token_ids)
            assert output.num_image_tokens > 0
    assert found == [_expected(folder, each) for each in chosen]
    assert len({tuple(each) for each in found}) == len(found)


def test_a_turned_picture_is_seen_as_it_is_shown(folder: Path, tmp_path: Path) -> None:
    from PIL import Image, ImageOps

    path = tmp_path / "turned.png"
    path.write_bytes(turned(120, 80, 6, "PNG"))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    content = [{"type": "image", "image": path}, QUESTION]
    with LLM(str(folder), num_blocks=600) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    with Image.open(path) as image:
        shown = ImageOps.exif_transpose(image)
    assert output.outputs[0].token_ids == _expected(folder, [shown])
