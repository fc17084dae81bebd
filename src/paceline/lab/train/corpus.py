"""What a head learns from: pieces of text, the model's hidden states over them, and the token it finds likeliest
behind each. States lie in a file that is mapped into memory: there may be gigabytes of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.decoder import Attend, Decoder

PIECE = 512  # most tokens of a text that are computed together
LARGEST = 65504.0  # that a half holds
LEAST_PIECE = 8
HELD_OUT = 16  # one piece of this many is not learned from
ABOUT, TOKENS, ENDS, LIKELIEST, STATES = (
    "corpus.json",
    "tokens.npy",
    "ends.npy",
    "likeliest.npy",
    "states.f16",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Pieces lie one behind the other; `ends` says where each ends."""

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]
    likeliest: NDArray[np.int32]  # the model's own next token
    states: NDArray[np.float16]  # [tokens, width]: hidden states one beside the other, the last one last
    digest: str

    def pieces(self, *, held_out: bool) -> list[tuple[int, int]]:
        """Begin and end of the pieces that are learned from, or of the others."""
        bounds = list(zip([0, *self.ends[:-1].tolist()], self.ends.tolist(), strict=True))
        every = min(HELD_OUT, max(2, len(bounds)))
        if len(bounds) == 1:
            return bounds
        return [each for number, each in enumerate(bounds) if (number % every == every - 1) == held_out]


def cut(texts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Pieces of the texts, as many as hold `most` tokens."""
    pieces: list[list[int]] = []
    total = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            piece = list(text[start : start + PIECE])[: most - total]
            if len(piece) >= LEAST_PIECE:
                pieces.append(piece)
                total += len(piece)
            if total + LEAST_PIECE > most:
                return pieces
    return pieces


def digest_of(path: Path, **about: Any) -> str:
    """Of a file of texts or prompts and what is made of it: what a run that goes on must have in common with the one
    that was stopped."""
    found = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    found.update(path.read_bytes())
    return found.hexdigest()


@torch.inference_mode()
def compute_states(
    folder: Path,
    decoder: Decoder,
    taps: Sequence[int],
    pieces: Sequence[Sequence[int]],
    digest: str,
    is_over: Callable[[], bool],
    at_once: int,
) -> Corpus:
    """Run the model over the pieces, `at_once` tokens together, until `is_over`; what was computed is kept in
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    device = decoder.parts.norm.weight.device
    width = (len(taps) + 1) * decoder.spec.hidden_size
    total = sum(map(len, pieces))
    states: NDArray[np.float16] = np.memmap(folder / STATES, np.float16, "w+", shape=(total, width))
    likeliest = np.zeros(total, np.int32)
    done: list[Sequence[int]] = []
    at = 0
    for batch in _batches(pieces, at_once):
        if done and is_over():
            break
        lengths = [len(piece) for piece in batch]
        tokens = torch.tensor([token for piece in batch for token in piece], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        tapped = dict.fromkeys(taps, torch.zeros(0))
        scale, windows = decoder.spec.softmax_scale, decoder.spec.windows
        attend = dense_attention(lengths, scale, windows, padded=device.type == "cuda")
        hidden = decoder.forward(tokens, positions, positions + 1, attend, tapped)
        joined = torch.cat([*(tapped[tap] for tap in taps), hidden], dim=-1)
        end = at + len(tokens)
        states[at:end] = joined.clamp(-LARGEST, LARGEST).half().cpu().numpy()
        likeliest[at:end] = torch.cat(
            [decoder.logits(part).argmax(dim=-1) for part in torch.split(hidden, 256)]
        ).cpu()
        at = end
        done += batch
    kept = np.array([token for piece in done for token in piece], np.int32)
    ends = np.cumsum([len(piece) for piece in done])
    for name, values in ((TOKENS, kept), (ENDS, ends), (LIKELIEST, likeliest[:at])):
        np.save(folder / name, values)
    (folder / ABOUT).write_text(json.dumps({"digest": digest, "width": width, "num_tokens": at}))
    found = open_corpus(folder, digest)
    assert found is not None
    return found


def open_corpus(folder: Path, digest: str) -> Corpus | None:
    """What an earlier run has computed over the same texts; None: nothing."""
    if not (folder / ABOUT).is_file():
        return None
    about = json.loads((folder / ABOUT).read_text())
    if about["digest"] != digest:
        return None
    shape = (about["num_tokens"], about["width"])
    return Corpus(
        tokens=np.load(folder / TOKENS),
        ends=np.load(folder / ENDS),
        likeliest=np.load(folder / LIKELIEST),
        states=np.memmap(folder / STATES, np.float16, "r", shape=shape),
        digest=digest,
    )


def dense_attention(
    lengths: Sequence[int], scale: float, windows: Sequence[int | None], *, padded: bool = False
) -> Attend:
    """Attention of whole texts, one behind the other. `padded`: all at once, as suits a GPU."""

    def mixed(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[texts, tokens, heads, head_dim]; what lies behind the end of a text is seen by nothing before it."""
        q, k, v = (heads.transpose(1, 2) for heads in (queries, keys, values))
        mask, window = None, windows[layer]
        if window is not None and window < q.shape[2]:
            place = torch.arange(q.shape[2], device=q.device)
            apart = place[:, None] - place
            mask = (apart >= 0) & (apart < window)
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(2)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts = zip(*(torch.split(each, list(lengths)) for each in (queries, keys, values)), strict=True)
        return torch.cat([mixed(layer, *(heads[None] for heads in part))[0] for part in parts])

    def attend_padded(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count = torch.tensor(lengths, device=queries.device)
        is_token = torch.arange(max(lengths), device=queries.device) < count[:, None]
        spread = [heads.new_zeros(*is_token.shape, *heads.shape[1:]) for heads in (queries, keys, values)]
        for into, heads in zip(spread, (queries, keys, values), strict=True):
            into[is_token] = heads
        return mixed(layer, *spread)[is_token]

    return attend_padded if padded else attend


def _batches(pieces: Sequence[Sequence[int]], budget: int) -> list[list[Sequence[int]]]:
    """Pieces in order, as many together as have `budget` tokens."""
    found: list[list[Sequence[int]]] = [[]]
    size = 0
    for piece in pieces:
        if found[-1] and size + len(piece) > budget:
            found.append([])
            size = 0
        found[-1].append(piece)
        size += len(piece)
    return found
