"""Log-probabilities: the log-softmax of the raw logits, before any rule or temperature.

For one token, its own value and rank (1 + the number of likelier tokens, so equals share a rank) and the
likeliest tokens in order, lower ids first among equals. The same number stands for the same token in both.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.plan import RowLogprobs

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

ALL = -1


def prompt_logprobs(
    logits: torch.Tensor, targets: I64, positions: I64, row: int, top: int
) -> tuple[RowLogprobs, ...]:
    """How likely each target was, where `logits[i]` predicts `targets[i]`, the token at `positions[i]`.

    A position whose logits are not finite numbers is left out: there is nothing true to say about it.
    """
    raw = logits.numpy()
    finite = np.isfinite(raw.max(axis=1, initial=-np.inf))
    return tuple(
        token_logprobs(raw[i], int(targets[i]), row, int(positions[i]), top)
        for i in np.flatnonzero(finite).tolist()
    )


def token_logprobs(raw: F32, token: int, row: int, position: int, top: int) -> RowLogprobs:
    """What is reported of one token; `top` is how many of the likeliest tokens, -1 for all."""
    wide = raw.astype(np.float64)
    wide -= wide.max()
    log_total = np.log(np.exp(wide).sum())
    likeliest = _likeliest(raw, len(raw) if top == ALL else min(top, len(raw)))
    return RowLogprobs(
        row=row,
        position=position,
        token=token,
        logprob=float(wide[token] - log_total),
        rank=1 + int(np.count_nonzero(raw > raw[token])),
        top_tokens=tuple(likeliest.tolist()),
        top_logprobs=tuple((wide[likeliest] - log_total).tolist()),
    )


def _likeliest(raw: F32, count: int) -> I64:
    """The tokens with the largest logits, largest first, lower ids first among equals."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    if count == len(raw):
        return np.argsort(-raw, kind="stable")
    smallest = torch.from_numpy(raw).topk(count).values.numpy()[-1]
    candidates = np.flatnonzero(raw >= smallest)  # in order of id
    return candidates[np.argsort(-raw[candidates], kind="stable")][:count]
