"""Training a head: batches of pieces, its own outputs fed back for as many tokens as it will guess, and how many of its
guesses on held-out pieces the model would take.

A batch holds pieces of like length, up to a number of tokens. At index t of a piece the head has token t and the
state behind token t - 1 and guesses token t + 1; then it has token t + 1 and its own output, and so on, as when it is
asked: at depth j, index t sees the keys of depth 0 up to t, and of the depths after that its own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.lab.train.corpus import Corpus
from paceline.models.draft_head import EagleHead, MedusaHead
from paceline.models.files.head_folder import HeadSpec, head_tensors
from paceline.models.files.safetensors import SafetensorsFile, write_safetensors

# Of learning: over the hidden size; at the end, as a share of that; steps until it is reached.
RATE, LAST_RATE, WARM_UP = 0.64, 0.05, 20
BY_DEPTH = 0.8  # weight of a guess, for each guess before it
LARGEST_GRADIENT = 1.0
REPORT_S = 60.0
ROWS_AT_ONCE = 1 << 16  # of states that go to a GPU
PROGRESS, PROGRESS_WEIGHTS = "progress.json", "progress.safetensors"

Head = EagleHead | MedusaHead
Pieces = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LargeModel:
    """What is needed of the large model."""

    output: Tensor  # rows of its output matrix, of the tokens that the head can guess
    norm: Tensor
    to_target: NDArray[np.int64]


@dataclass(slots=True)
class Progress:
    """How far a training is."""

    steps: int = 0
    epoch: int = 0
    tokens: int = 0  # learned from, each time they are
    seconds: float = 0.0
    acceptance: list[float] = field(default_factory=list)  # by depth, on held-out pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLimits:
    """How long it goes on."""

    seconds: float
    steps: int  # 0: as many as there is time for
    depth: int
    tokens_at_once: int
    seed: int

    def share(self, progress: Progress) -> float:
        """How much of it is over, from 0 to 1."""
        by_steps = progress.steps / self.steps if self.steps else 0.0
        return min(max(progress.seconds / self.seconds, by_steps), 1.0)


def first_weights(spec: HeadSpec, target: LargeModel, seed: int) -> dict[str, Tensor]:
    """Norm and output matrix begin as the model's own; what is random is small."""
    made = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, shape in head_tensors(spec):
        if name == "norm.weight":
            value = target.norm.cpu().clone()
        elif name.endswith("norm.weight"):
            value = torch.ones(shape)
        elif name == "lm_head.weight" or name.endswith(".1.weight"):
            value = target.output.cpu().clone()
        elif ".0.linear." in name:
            value = torch.zeros(shape)
        else:
            value = torch.randn(shape, generator=made) * (0.5 / math.sqrt(shape[-1]))
        found[name] = value.to(target.output.device).requires_grad_()
    return found


class Training:
    """Learns in steps; can be put aside and taken up again."""

    def __init__(
        self,
        net: Head,
        weights: dict[str, Tensor],
        target: LargeModel,
        corpus: Corpus,
        limits: TrainingLimits,
    ) -> None:
        self._net, self.weights, self._target, self._corpus = net, weights, target, corpus
        self._limits = limits
        self._device = target.output.device
        self._states = _on_gpu(corpus.states, self._device)
        self.progress = Progress()
        self._rate = RATE / target.output.shape[1]
        matrices = [value for value in weights.values() if value.dim() > 1]
        others = [value for value in weights.values() if value.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=self._rate,
            betas=(0.9, 0.95),
        )

    def run(self, report: Callable[[Progress], None]) -> None:
        """Learn until the limits; `report` is called every minute, and at the end."""
        limits, progress = self._limits, self.progress
        began_s = time.monotonic() - progress.seconds
        reported_s = progress.seconds
        while limits.share(progress) < 1.0:
            for pieces in self._batches(self._corpus.pieces(held_out=False), progress.epoch):
                self._step(pieces)
                progress.seconds = time.monotonic() - began_s
                if progress.seconds - reported_s >= REPORT_S:
                    progress.acceptance = self.acceptance()
                    report(progress)
                    reported_s = progress.seconds = time.monotonic() - began_s
                if limits.share(progress) >= 1.0:
                    break
            progress.epoch += 1
        progress.acceptance = self.acceptance()
        report(progress)

    def _step(self, pieces: Pieces) -> None:
        limits, progress = self._limits, self.progress
        warm = min(1.0, (progress.steps + 1) / WARM_UP)
        fall = 0.5 * (1.0 + math.cos(math.pi * limits.share(progress)))
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * warm * (LAST_RATE + (1.0 - LAST_RATE) * fall)
        batch = self._batch(pieces)
        wanted = F.softmax(F.linear(batch.last, self._target.output), dim=-1)
        loss = torch.zeros((), device=self._device)
        for depth, logits in enumerate(self._guesses(batch)):
            valid = batch.valid(depth)
            ours = F.log_softmax(logits[valid], dim=-1)
            theirs = wanted[batch.shifted(depth)[valid]]
            loss = loss - BY_DEPTH**depth * (ours * theirs).sum(-1).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.weights.values(), LARGEST_GRADIENT)
        self._optimizer.step()
        progress.steps += 1
        progress.tokens += batch.num_tokens

    @torch.no_grad()
    def acceptance(self) -> list[float]:
        """Share of guesses that are the model's likeliest token, by depth, where those before were right."""
        right = np.zeros(self._limits.depth)
        asked = np.zeros(self._limits.depth)
        to_target = torch.from_numpy(self._target.to_target).to(self._device)
        for pieces in self._batches(self._corpus.pieces(held_out=True), 0):
            batch = self._batch(pieces)
            follows = torch.ones(len(batch.tokens), dtype=torch.bool, device=self._device)
            for depth, logits in enumerate(self._guesses(batch)):
                at = batch.shifted(depth)
                valid = batch.valid(depth) & follows
                guess = to_target[logits.argmax(dim=-1)]
                asked[depth] += int(valid.sum())
                right[depth] += int((guess == batch.likeliest[at])[valid].sum())
                # What comes next is asked with the text's token: only where that was the guess.
                follows = valid & (guess == batch.tokens[batch.shifted(depth + 1)])
        return [round(float(share), 4) for share in right / np.maximum(asked, 1)]

    def _guesses(self, batch: _Windows) -> Iterator[Tensor]:
        """Logits by depth."""
        attend = _Unrolled(batch.shape, self._net.softmax_scale)
        states = batch.before(self._net.states(batch.taps, batch.last))
        place = torch.arange(batch.shape[1], device=self._device).repeat(batch.shape[0])
        for depth in range(min(self._limits.depth, self._net.most)):
            positions = place + depth
            tokens = batch.tokens[batch.shifted(depth)]
            logits, states = self._net.guess(depth, tokens, states, positions, positions + 1, attend)
            yield logits

    def _batches(self, pieces: Pieces, epoch: int) -> Iterator[Pieces]:
        """Pieces of like length together, in another order each time."""
        rng = np.random.default_rng((self._limits.seed, epoch))
        order = sorted(pieces, key=lambda piece: (piece[1] - piece[0]) * rng.uniform(0.9, 1.1))
        found: list[Pieces] = [[]]
        for piece in order:
            longest = max((end - begin for begin, end in [*found[-1], piece]))
            if found[-1] and longest * (len(found[-1]) + 1) > self._limits.tokens_at_once:
                found.append([])
            found[-1].append(piece)
        for number in rng.permutation(len(found)):
            yield found[number]

    def _batch(self, pieces: Pieces) -> _Windows:
        corpus, device = self._corpus, self._device
        longest = max(end - begin for begin, end in pieces)
        lengths = torch.tensor([end - begin for begin, end in pieces], device=device)
        place = np.minimum(np.arange(longest), np.array([[end - begin - 1] for begin, end in pieces]))
        index = (place + np.array([[begin] for begin, _ in pieces])).ravel()
        if self._states is not None:
            states = self._states[torch.from_numpy(index).to(device)].float()
        else:
            states = torch.from_numpy(np.array(corpus.states[index])).to(device).float()
        *taps, last = torch.split(states, self._target.output.shape[1], dim=-1)
        return _Windows(
            shape=(len(pieces), longest),
            lengths=lengths,
            tokens=torch.from_numpy(corpus.tokens[index].astype(np.int64)).to(device),
            likeliest=torch.from_numpy(corpus.likeliest[index].astype(np.int64)).to(device),
            taps=taps,
            last=last,
        )

    # -- put aside and taken up ----------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        kept = {f"weight.{name}": value for name, value in self.weights.items()}
        for name, value in self.weights.items():
            for what, moment in self._optimizer.state.get(value, {}).items():
                kept[f"{what}.{name}"] = (
                    torch.as_tensor(moment).float().reshape(torch.as_tensor(moment).shape)
                )
        arrays = {
            name: value.detach().cpu().numpy().reshape(value.shape or (1,)) for name, value in kept.items()
        }
        about = {name: getattr(self.progress, name) for name in Progress.__slots__}
        write_safetensors(folder / PROGRESS_WEIGHTS, arrays, {"digest": self._corpus.digest})
        (folder / PROGRESS).write_text(json.dumps({"digest": self._corpus.digest, **about}))

    def load(self, folder: Path) -> bool:
        """Go on where an earlier run over the same corpus was; False: there was none."""
        if not (folder / PROGRESS).is_file():
            return False
        about = json.loads((folder / PROGRESS).read_text())
        if about.pop("digest") != self._corpus.digest:
            return False
        self.progress = Progress(**about)
        file = SafetensorsFile(folder / PROGRESS_WEIGHTS)
        for stored in file.entries:
            what, _, whose = stored.partition(".")
            weight = self.weights[whose]
            value = torch.from_numpy(np.array(file.tensor(stored).to_float32()))
            if what == "weight":
                with torch.no_grad():
                    weight.copy_(value)
            else:
                kept = value[0] if what == "step" else value.to(weight.device)
                self._optimizer.state[weight][what] = kept
        return True


def _on_gpu(states: NDArray[np.float16], device: torch.device) -> Tensor | None:
    """All states in a GPU's memory, if they take half of it at most: batches come from there much faster."""
    if device.type != "cuda" or states.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        return None
    found = torch.empty(states.shape, dtype=torch.float16, device=device)
    for start in range(0, len(states), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        found[part] = torch.from_numpy(np.array(states[part])).to(device)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Windows:
    """Pieces padded to one length, flat; padding repeats a piece's last token."""

    shape: tuple[int, int]  # pieces, and tokens of each
    lengths: Tensor
    tokens: Tensor
    likeliest: Tensor
    taps: list[Tensor]
    last: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def shifted(self, depth: int) -> Tensor:
        """Where the token `depth` behind each lies; at the end of a piece, its last."""
        count, length = self.shape
        place = torch.arange(length, device=self.tokens.device)
        moved = (place + depth).clamp(max=length - 1)
        return (torch.arange(count, device=self.tokens.device)[:, None] * length + moved).flatten()

    def valid(self, depth: int) -> Tensor:
        """Where a token that many behind is in the piece."""
        place = torch.arange(self.shape[1], device=self.tokens.device)
        return (place + depth < self.lengths[:, None]).flatten()

    def before(self, behind: Tensor) -> Tensor:
        """States that go with each token: those behind the token before it, and zero for the first."""
        spread = behind.view(*self.shape, -1)
        return torch.cat((torch.zeros_like(spread[:, :1]), spread[:, :-1]), dim=1).flatten(0, 1)


class _Unrolled:
    """Attention while outputs are fed back."""

    def __init__(self, shape: tuple[int, int], scale: float) -> None:
        self._shape, self._scale = shape, scale
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, length = self._shape
        shared = queries.shape[1] // keys.shape[1]

        def spread(heads: Tensor, times: int) -> Tensor:
            return (
                heads.view(count, length, -1, heads.shape[-1]).transpose(1, 2).repeat_interleave(times, dim=1)
            )

        q = spread(queries, 1)
        self._keys.append(spread(keys, shared))
        self._values.append(spread(values, shared))
        first, *others = self._keys
        if not others:
            mixed = F.scaled_dot_product_attention(
                q, first, self._values[0], is_causal=True, scale=self._scale
            )
        else:
            scores = q @ first.transpose(-1, -2) * self._scale
            later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            own = [(q * key).sum(-1, keepdim=True) * self._scale for key in others]
            weights = F.softmax(torch.cat([scores.masked_fill(later, -torch.inf), *own], dim=-1), dim=-1)
            mixed = weights[..., :length] @ self._values[0]
            for number, value in enumerate(self._values[1:]):
                mixed = mixed + weights[..., length + number, None] * value
        return mixed.transpose(1, 2).reshape(count * length, -1)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        raise AssertionError("training stores nothing")
