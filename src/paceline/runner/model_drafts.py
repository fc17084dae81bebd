"""Drafts of a model: an eagle or medusa head, or a smaller model, asked before each step for the tokens behind a row's
last one.

What the model keeps of a token lies at the token's slot, in further layers of the same blocks, so that shared
beginnings, forks, swaps, copies and preemptions move it with everything else. The state that goes with a row's next
token is one vector by row; where it is not known (a beginning that was found in the cache, a row that came back) it is
zero: that costs acceptance, never correctness. Drafts are drawn with the row's own noise and temperature, which makes
them likelier to be what the large model draws. A row takes the guess of its own text where that is trusted more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.plan import DRAFT_KINDS, LEAST_CHANCE, DraftTally, StepPlan
from paceline.models.draft_head import DraftNet
from paceline.runner.attention import StepAttention
from paceline.runner.device_rows import DeviceRows, Drafts, FlatBatch, one_token_each, part_of
from paceline.runner.drafts import EIGHTHS, NO_STATE, OF_MODEL, Counts, NgramDrafter
from paceline.runner.sampling.sampler import Sampler
from paceline.runner.torch_step import TorchStep

Index = NDArray[np.int64]
Bool = NDArray[np.bool_]

PATIENCE = 16  # steps in which no draft was worth its time; after them it is asked now and then
EVERY = 64  # in one step of this many
MOST_FAILURES = 3  # steps in which it gives no numbers

_logger = logging.getLogger("paceline")


class ModelDrafter:
    """Asks a model, and the row's own text (`drafts.FollowingDrafter`)."""

    def __init__(self, step: TorchStep, net: DraftNet, num_rows: int, others: NgramDrafter) -> None:
        self._step, self._net, self._others = step, net, others
        self._first_layer = step.spec.num_layers
        self._state = torch.zeros(num_rows, net.state_size)
        # Position of the token that the state comes from.
        self._state_behind: Index = np.full(num_rows, NO_STATE)
        self._trust: NDArray[np.float64] = np.zeros(DRAFT_KINDS)
        self._guesses: dict[int, list[tuple[int, int]]] = {}  # token and kind, by row, in the last step
        self._taken: set[int] = set()  # rows whose drafts are of these
        self._compared: Index = np.zeros(DRAFT_KINDS, np.int64)
        self._equal: Index = np.zeros(DRAFT_KINDS, np.int64)
        self._idle = self._steps = self._failures = 0
        self._sampler: Sampler | None = None

    @property
    def is_off(self) -> bool:
        return self._failures >= MOST_FAILURES

    # -- rows ----------------------------------------------------------------------------------------------

    def attach(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def join(self, rows: DeviceRows, row: int, prediction: Sequence[int] = ()) -> None:
        self._state_behind[row] = NO_STATE
        self._others.join(rows, row, prediction)

    def fork(self, source: int, target: int) -> None:
        self._state[target], self._state_behind[target] = self._state[source], self._state_behind[source]

    def leave(self, rows: DeviceRows, row: int) -> None:
        self._others.leave(rows, row)

    @torch.inference_mode()
    def follow(self, rows: DeviceRows, batch: FlatBatch) -> None:
        """Keep what the model needs of the tokens that are certain now: those below `rows.computed`."""
        if self.is_off:
            return
        end = rows.computed[batch.rows]
        keep = ~batch.masked[batch.row_of] & (batch.positions < end[batch.row_of])
        behind = _finite(self._net.states(*self._step.seen()))
        if self._net.layers and keep.any():
            first = np.cumsum(batch.count) - batch.count
            before = torch.cat((behind[-1:], behind[:-1]))
            before[torch.from_numpy(first)] = self._states_before(batch.rows, batch.start)
            part, before = part_of(batch, keep), before[torch.from_numpy(keep)]
            with self._step.workers.step(len(part.tokens)):
                self._net.store(*_tensors(part, before), self._attention(rows, part))
        new = np.flatnonzero(~batch.masked & (end > batch.start))
        last = batch.last[new] - batch.count[new] + end[new] - batch.start[new]
        self._state[torch.from_numpy(batch.rows[new])] = behind[torch.from_numpy(last)]
        self._state_behind[batch.rows[new]] = end[new] - 1

    def _states_before(self, at: Index, positions: Index) -> Tensor:
        """What goes with the tokens of the rows `at` at these positions."""
        is_known = torch.from_numpy(self._state_behind[at] == positions - 1)
        return torch.where(is_known[:, None], self._state[torch.from_numpy(at)], 0.0)

    def _attention(self, rows: DeviceRows, batch: FlatBatch) -> _Further:
        step = self._step
        scale = self._net.softmax_scale
        return _Further(
            StepAttention(step.kv, rows, batch, scale=scale, workers=step.workers), self._first_layer
        )

    # -- drafts --------------------------------------------------------------------------------------------

    def propose(self, rows: DeviceRows, plan: StepPlan, at: Index) -> Drafts | None:
        if len(plan.trust):
            self._trust = plan.trust.astype(np.float64)
        self._guesses.clear()
        self._taken.clear()
        self._steps += 1
        drafts = self._others.propose(rows, plan, at)
        is_due = bool(self._steps % EVERY == 0) or (plan.draft_width > 0 and self._idle < PATIENCE)
        if self.is_off or not is_due or not len(at):
            return drafts
        room = np.where(rows.ended[at], 0, rows.limit[at] - rows.num_tokens[at] - 1)
        promises = np.array(self._others.promises(at))
        most = self._trust[OF_MODEL : OF_MODEL + EIGHTHS].max()
        asked = np.flatnonzero((room > 0) & (promises < most))
        if not len(asked):
            return drafts
        chains = self._ask(rows, plan, at[asked], room[asked], promises[asked])
        return self._merged(plan, at, drafts, asked, chains)

    @torch.inference_mode()
    def _ask(
        self, rows: DeviceRows, plan: StepPlan, at: Index, room: Index, promises: NDArray[np.float64]
    ) -> list[list[float]]:
        """The chance of each draft that is worth its time, by row; `_guesses` gets the drafts, and of the other rows
        the first."""
        floor, width = max(plan.draft_floor, LEAST_CHANCE), max(plan.draft_width, 1)
        chains: list[list[float]] = [[] for _ in at]
        positions = rows.num_tokens[at] - 1
        tokens, states = rows.tokens[at, positions], self._states_before(at, positions)
        left, chance = np.arange(len(at)), np.ones(len(at))
        for depth in range(min(width, self._net.most)):
            batch = one_token_each(rows, at[left], positions, tokens, self._step.kv.block_size)
            with self._step.workers.step(len(left)):
                logits, states = self._net.guess(
                    depth, *_tensors(batch, states), self._attention(rows, batch)
                )
            drawn = self._drawn(logits, at[left], positions + 1)
            if drawn is None:
                self._fail()
                return [[] for _ in at]
            tokens, kinds = drawn
            trust = self._trust[kinds]
            chance = chance * trust
            for row, token, kind in zip(at[left].tolist(), tokens.tolist(), kinds.tolist(), strict=True):
                self._guesses.setdefault(row, []).append((token, kind))
            goes_on = (chance >= floor) & (depth < room[left])
            if depth == 0:
                goes_on &= trust > promises
            for number, each in zip(left[goes_on].tolist(), chance[goes_on].tolist(), strict=True):
                chains[number].append(each)
            left, chance, tokens = left[goes_on], chance[goes_on], tokens[goes_on]
            states, positions = states[torch.from_numpy(goes_on)], positions[goes_on] + 1
            if not len(left):
                break
        return chains

    def _drawn(self, logits: Tensor, at: Index, positions: Index) -> tuple[Index, Index] | None:
        """Tokens drawn from the model's logits, and their kinds. None: the logits are no numbers."""
        if not bool(torch.isfinite(logits.amax(dim=-1)).all()):  # the largest: NaN counts as such
            return None
        values: NDArray[np.float32] = logits.numpy()
        ids = self._net.to_target
        if ids is not None and len(ids) < self._step.spec.vocab_size:
            values = np.full((len(values), self._step.spec.vocab_size), -np.inf, np.float32)
            values[:, ids] = logits.numpy()
        elif ids is not None:
            values = values[:, np.argsort(ids)]
        assert self._sampler is not None
        tokens = self._sampler.guess(values, at, positions)
        chances = torch.exp(
            torch.from_numpy(values[np.arange(len(at)), tokens]) - torch.logsumexp(logits, dim=-1)
        )
        return tokens, OF_MODEL + np.minimum((chances.numpy() * EIGHTHS).astype(np.int64), EIGHTHS - 1)

    def _merged(
        self, plan: StepPlan, at: Index, drafts: Drafts | None, asked: Index, chains: list[list[float]]
    ) -> Drafts | None:
        """Of the rows `asked`, those with drafts of the model have them instead of what they had."""
        has = [number for number, chain in enumerate(chains) if chain]
        if not has or not plan.draft_width:
            self._idle += 1
            return drafts
        self._idle = 0
        if drafts is None:
            drafts = Drafts(np.zeros((len(at), plan.draft_width), np.int64), np.zeros(len(at), np.int64))
        places = asked[has]
        drafts.number[places] = 0
        kept = _likeliest([chains[number] for number in has], plan.draft_tokens - int(drafts.number.sum()))
        for place, count in zip(places.tolist(), kept, strict=True):
            row = int(at[place])
            drafts.tokens[place, :count] = [token for token, _ in self._guesses[row][:count]]
            drafts.number[place] = count
            if drafts.predicted is not None:
                drafts.predicted[place] = 0
            if count:
                self._taken.add(row)
        return drafts if drafts.number.any() else None

    def _fail(self) -> None:
        self._guesses.clear()
        self._failures += 1
        if self.is_off:
            _logger.warning(
                "the %s that makes drafts gave no numbers in %d steps and is switched off; answers do not change",
                self._net.name.replace("_", " "),
                MOST_FAILURES,
            )

    # -- what became of them -------------------------------------------------------------------------------

    def observe(self, rows: DeviceRows, at: Index, count: Counts, verified: Index | None) -> None:
        ends = rows.num_tokens[at]
        others = verified
        if verified is not None and self._taken:
            others = np.where(np.isin(at, list(self._taken)), 0, verified)
        self._others.observe(rows, at, count, others)
        for number, row in enumerate(at.tolist()):
            guesses = self._guesses.get(row)
            if not guesses or not count[number]:
                continue
            was_verified = verified is not None and row in self._taken
            most = max(int(verified[number]), 1) if verified is not None and was_verified else 1
            new = rows.tokens[row, ends[number] - count[number] : ends[number]].tolist()
            for (token, kind), came in zip(guesses[:most], new, strict=False):
                self._compared[kind] += 1
                self._equal[kind] += token == came
                if token != came:
                    break

    def take_tally(self) -> DraftTally | None:
        found = self._others.take_tally()
        if not self._compared.any():
            return found
        compared, equal = self._compared.astype(np.int32), self._equal.astype(np.int32)
        self._compared[:] = self._equal[:] = 0
        if found is None:
            return DraftTally(compared, equal)
        return DraftTally(found.compared + compared, found.equal + equal)


class _Further:
    """Attention of further layers, which are counted from 0. What is not finite is kept as zero: a later owner of the
    slot must not meet it."""

    def __init__(self, attention: StepAttention, first: int) -> None:
        self._attention, self._first = attention, first

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._attention(self._first + layer, queries, _finite(keys), _finite(values))

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._attention.store(self._first + layer, _finite(keys), _finite(values))


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def _tensors(batch: FlatBatch, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = (torch.from_numpy(column) for column in (batch.tokens, batch.positions, batch.lengths))
    tokens, positions, lengths = columns
    return tokens, states, positions, lengths


def _likeliest(chains: list[list[float]], most: int) -> list[int]:
    """How many drafts of each row are kept, so that no more than `most` are: a chance never rises along a row."""
    ranked = sorted(
        (-chance, depth, number) for number, chain in enumerate(chains) for depth, chance in enumerate(chain)
    )
    kept = [0] * len(chains)
    for _, _, number in ranked[: max(most, 0)]:
        kept[number] += 1
    return kept
