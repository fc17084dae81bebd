"""A model that really sees: it learns to read two digits here, and reads pictures it has never seen over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont

from tests.e2e.client_server import ClientServer, client_server, keys_file
from tests.pictures import encoded
from tests.torch.vision.test_prompts import tile_processor
from tests.vision_folder import SIDE, TILE_CONTROLS, write_tile_model

NAME = "reader"
END = TILE_CONTROLS.index("<end_of_utterance>")
QUESTION = {"type": "text", "text": "Read."}
WIDTH = 48
NUM_LEARNT, NUM_STEPS, BATCH, RATE = 5_000, 340, 64, 3e-3
NUM_READ, LEAST = 500, 0.95
font = cache(ImageFont.load_default)


def digits(rng: np.random.Generator) -> tuple[Image.Image, str]:
    """A picture of two digits in some size, in some colours, dark on light or light on dark."""
    side, text = int(rng.integers(48, 121)), f"{rng.integers(100):02}"
    colours = [tuple(rng.integers(low, low + 90, 3).tolist()) for low in (0, 165)]
    back, front = colours if rng.random() < 0.5 else colours[::-1]
    image = Image.new("RGB", (side, side), back)
    pen = ImageDraw.Draw(image)
    for index, digit in enumerate(text):
        across = side * (0.27 + 0.46 * index + rng.uniform(-0.04, 0.04))
        down = side * (0.5 + rng.uniform(-0.08, 0.08))
        pen.text((across, down), digit, front, font(int(side * rng.uniform(0.6, 0.75))), anchor="mm")
    return image, text


def as_given(images: list[Image.Image]) -> torch.Tensor:
    """What the processor makes of them: one tile each."""
    tiles = np.stack([np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)) for image in images])
    return torch.from_numpy((tiles.transpose(0, 3, 1, 2) / 127.5 - 1).astype(np.float32))[:, None]


def write_reader(folder: Path) -> Path:
    """The folder of the model, without weights."""
    write_tile_model(folder)
    config = json.loads((folder / "config.json").read_text())
    for part in ("text_config", "vision_config"):
        config[part] |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["size"] = {"longest_edge": SIDE}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def prompt_of(processor: Any) -> str:
    messages = [{"role": "user", "content": [{"type": "image"}, QUESTION]}]
    return str(processor.apply_chat_template(messages, add_generation_prompt=True))


def teach(folder: Path) -> Any:
    """Train transformers' model on pictures drawn here, and save it."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    # As wide as a model this small needs it; with the usual 0.02 it learns nothing for hundreds of steps.
    config.text_config.initializer_range = config.vision_config.initializer_range = 0.12
    model = transformers.AutoModelForImageTextToText.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    processor = tile_processor(folder)
    drawn = [digits(rng) for _ in range(NUM_LEARNT)]
    pixels = as_given([image for image, _ in drawn])
    first = processor(
        text=prompt_of(processor), images=[[drawn[0][0]]], return_tensors="pt", add_special_tokens=False
    )
    assert torch.allclose(first["pixel_values"][0], pixels[0], atol=1e-6)
    prompt = first["input_ids"].expand(BATCH, -1)
    ids = processor.tokenizer.convert_tokens_to_ids
    answers = torch.tensor([[*map(ids, text), END] for _, text in drawn])
    values = torch.tensor([list(map(int, text)) for _, text in drawn])
    helper, vectors = torch.nn.Linear(WIDTH, 10), list[torch.Tensor]()
    hook = model.model.connector.register_forward_hook(lambda *call: vectors.append(call[2]))
    parameters = [*model.parameters(), *helper.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01, betas=(0.9, 0.98))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=NUM_STEPS, pct_start=0.15)
    model.train()
    for _ in range(NUM_STEPS):
        chosen = torch.randint(NUM_LEARNT, (BATCH,))
        # A pixel aside and a little noise: pictures come again, and are to be read, not remembered.
        moved = torch.roll(pixels[chosen], tuple(torch.randint(-1, 2, (2,)).tolist()), (3, 4))
        given = torch.cat([prompt, answers[chosen, :2]], dim=1)
        logits = model(
            input_ids=given,
            pixel_values=moved + 0.05 * torch.randn_like(moved),
            logits_to_keep=3,
            use_cache=False,
        ).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers[chosen].flatten())
        # Without this the encoder learns what the decoder looks at, and the decoder that there is nothing to see.
        halves = vectors.pop().view(BATCH, 2, 2, WIDTH).mean(1)
        loss = loss + torch.nn.functional.cross_entropy(
            helper(halves).flatten(0, 1), values[chosen].flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    hook.remove()
    settings = (folder / "config.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "config.json").write_bytes(settings)
    return model.eval()


class ReaderServer(ClientServer):
    """Serves a folder that is there already."""

    def _model_flags(self) -> list[str]:
        keys = keys_file(self.folder / "keys")
        return [str(self.folder / NAME), "--served-model-name", NAME, "--api-keys-file", str(keys)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ClientServer]]:
    """The model of transformers, and a server of the folder it was saved to."""
    folder = tmp_path_factory.mktemp("reads")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of steps this small most would be waiting for each other
    try:
        model = teach(write_reader(folder / NAME))
    finally:
        torch.set_num_threads(threads)
    with client_server(folder, kind=ReaderServer) as server:
        server.wait_for(200)
        yield model, server


@torch.inference_mode()
def expected(model: Any, folder: Path, images: list[Image.Image]) -> list[str]:
    """What transformers reads, with its own processor."""
    processor = tile_processor(folder)
    given = processor(
        text=[prompt_of(processor)] * len(images),
        images=[[image] for image in images],
        return_tensors="pt",
        add_special_tokens=False,
    )
    made = model.generate(**given, max_new_tokens=3, do_sample=False, eos_token_id=END, pad_token_id=END)
    told = made[:, given["input_ids"].shape[1] :]
    return [str(processor.tokenizer.decode(ids, skip_special_tokens=True)) for ids in told]


@pytest.mark.campaign
def test_pictures_it_has_never_seen_are_read_as_transformers_reads_them(
    reader: tuple[Any, ClientServer],
) -> None:
    model, server = reader
    rng = np.random.default_rng(999)
    drawn = [digits(rng) for _ in range(NUM_READ)]

    def read(image: Image.Image) -> str:
        content = [{"type": "image_url", "image_url": {"url": data_url(image)}}, QUESTION]
        body = {"model": NAME, "messages": [{"role": "user", "content": content}]}
        reply = server.ask("POST", "/v1/chat/completions", {**body, "max_tokens": 3, "temperature": 0})
        assert reply.status == 200, reply.body
        return str(reply.json["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, (image for image, _ in drawn)))
    assert found == expected(model, server.folder / NAME, [image for image, _ in drawn])
    right = sum(text == told for (_, text), told in zip(drawn, found, strict=True))
    assert right >= LEAST * NUM_READ, f"{right} of {NUM_READ}"


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image, "PNG")).decode()
