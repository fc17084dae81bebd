"""Tiny random models that see pictures, made by transformers and saved to disk, and prompts for them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from paceline.core.stretch import MediaInput, MediaPart
from paceline.models.files.encoder import CLIP_DEVIATION, CLIP_MEAN

VOCAB, MARK = 160, 159  # the last token stands for a vector
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 4,
    "initializer_range": 0.15,
}


class Kind(NamedTuple):
    """A family."""

    config: Any
    grids: tuple[tuple[int, int], ...]  # rows and columns of patches of its pictures
    size: int  # pixels of a side of a patch
    merge: int
    frames: int = 0  # of a patch, where pictures come as patches
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)


KINDS = {
    "smolvlm": Kind(
        transformers.SmolVLMConfig(
            text_config=transformers.LlamaConfig(**_TEXT),
            vision_config={**_SIGLIP, "image_size": 32},
            scale_factor=4,
            image_token_id=MARK,
            tie_word_embeddings=True,
        ),
        ((8, 8),) * 4,
        4,
        4,
    ),
    # Tiles of another size than the table of positions: places between those of the table.
    "idefics3": Kind(
        transformers.Idefics3Config(
            text_config=transformers.LlamaConfig(**_TEXT),
            vision_config={**_SIGLIP, "image_size": 56},
            scale_factor=2,
            image_token_id=MARK,
        ),
        ((12, 12),) * 4,
        4,
        2,
    ),
    # Windows of three squares a side, of which some are cut by the edges of pictures.
    "qwen2_5_vl": Kind(
        transformers.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": {"mrope_section": [2, 3, 3], "rope_theta": 1e4}},
            vision_config={
                "depth": 4,
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_heads": 3,
                "patch_size": 4,
                "window_size": 24,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1, 3],
                "initializer_range": 0.15,
            },
            image_token_id=MARK,
        ),
        ((10, 8), (6, 22), (12, 12)),
        4,
        2,
        2,
        CLIP_MEAN,
        CLIP_DEVIATION,
    ),
    # Three layers of the decoder get vectors of their own; places between those of a table of 5 x 5.
    "qwen3_vl": Kind(
        transformers.Qwen3VLConfig(
            text_config={
                **_TEXT,
                "num_hidden_layers": 4,
                "head_dim": 16,
                "rope_parameters": {"mrope_section": [4, 2, 2], "rope_theta": 1e4},
            },
            vision_config={
                "depth": 5,
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_heads": 3,
                "patch_size": 4,
                "out_hidden_size": 64,
                "num_position_embeddings": 25,
                "deepstack_visual_indexes": [0, 1, 3],
                "initializer_range": 0.15,
            },
            image_token_id=MARK,
            tie_word_embeddings=True,
        ),
        ((10, 8), (6, 22), (2, 14)),
        4,
        2,
        2,
    ),
}


def save_model(name: str, folder: Path, **vision: int) -> Any:
    """Write a model to `folder` and return it. `vision`: other sizes of its encoder."""
    torch.manual_seed(7)
    config = copy.deepcopy(KINDS[name].config)
    for key, value in vision.items():
        setattr(config.vision_config, key, value)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key.lower() or key.endswith("bias"):  # ones and zeros would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
        # No answer has it: the reference would look for a picture.
        model.get_output_embeddings().weight[MARK] = 0
    model.save_pretrained(folder)
    return model.float().eval()


class Picture(NamedTuple):
    """One item of a prompt."""

    given: MediaInput
    pixels: torch.Tensor  # as transformers wants them


def picture(name: str, seed: int, grid: tuple[int, int] = (0, 0)) -> Picture:
    """A random one, in one of the shapes of its family unless another is given."""
    kind = KINDS[name]
    rows, columns = grid if grid[0] else kind.grids[seed % len(kind.grids)]
    side, merge = kind.size, kind.merge
    bytes_ = np.random.default_rng(seed).integers(0, 256, (rows * side, columns * side, 3), np.uint8)
    scaled = (bytes_ * (1 / 255)).astype(np.float32)
    values = (scaled - np.array(kind.mean, np.float32)) / np.array(kind.deviation, np.float32)

    def patches(pixels: np.ndarray) -> np.ndarray:
        """Square by square, each patch with its channels one behind the other."""
        cut = pixels.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
        return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, -1)

    given = MediaInput(
        content=f"{name} {seed}".encode(),
        units=rows * columns,
        outputs=rows * columns // kind.merge**2,
        pixels=patches(bytes_).reshape(rows * columns, -1) if kind.frames else bytes_[None],
        grid=(1, rows, columns),
    )
    if kind.frames:
        flat = np.repeat(patches(values), kind.frames, axis=1).reshape(rows * columns, -1)
        return Picture(given, torch.from_numpy(flat))
    return Picture(given, torch.from_numpy(values.transpose(2, 0, 1).copy()))


class Prompt(NamedTuple):
    """Tokens with pictures."""

    tokens: list[int]
    parts: list[MediaPart]
    pictures: list[Picture]


def prompt(name: str, *parts: int | Picture, seed: int = 0) -> Prompt:
    """So many random tokens, or a picture, one after the other."""
    rng, made = np.random.default_rng(seed), Prompt([], [], [])
    for part in parts:
        if isinstance(part, Picture):
            made.parts.append(MediaPart(len(made.tokens), part.given))
            made.pictures.append(part)
            made.tokens.extend([MARK] * part.given.outputs)
        else:
            made.tokens.extend(rng.integers(3, MARK, part).tolist())
    return made


@torch.inference_mode()
def reference_logits(model: Any, given: Prompt) -> torch.Tensor:
    """Of each token, [tokens, vocabulary]."""
    more: dict[str, Any] = {}
    if given.pictures and given.pictures[0].pixels.dim() == 2:
        more["pixel_values"] = torch.cat([each.pixels for each in given.pictures])
        more["image_grid_thw"] = torch.tensor([each.given.grid for each in given.pictures])
        more["mm_token_type_ids"] = (torch.tensor([given.tokens]) == MARK).int()
    elif given.pictures:
        more["pixel_values"] = torch.stack([each.pixels for each in given.pictures])[None]
    found: torch.Tensor = model(input_ids=torch.tensor([given.tokens]), **more).logits[0]
    return found


def reference_tokens(model: Any, given: Prompt, count: int) -> list[int]:
    """The greedy answer, computed whole for each token: there is nothing that could differ from it. Computed once for
    all tests of a model: `_ANSWERS` also keeps the model, so that no other one gets its identity."""
    key = (model, tuple(given.tokens), tuple(each.given.content for each in given.pictures), count)
    if key not in _ANSWERS:
        tokens = list(given.tokens)
        for _ in range(count):
            tokens.append(int(reference_logits(model, given._replace(tokens=tokens))[-1].argmax()))
        _ANSWERS[key] = tokens[len(given.tokens) :]
    return list(_ANSWERS[key])


_ANSWERS: dict[Any, list[int]] = {}
