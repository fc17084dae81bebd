"""Drafts on the CPU: guesses of a row's next tokens, from what its own tokens and earlier texts have been like.

A row that has said the same few tokens before is likely to go on as it did then. Each row has an index of where its
last pairs and fours of tokens stood, which goes with its owner. A request may bring a prediction: a text it is expected
to say, which its rows alone draft from. With `history`, texts that have ended well are kept in a ring, with a hash of
their threes and sixes; the tenant is in the hash, so that no row finds another tenant's text. A draft is a hint: it can
be wrong, and costs time then; whether it was right is decided by the token that is drawn.

Of a row's own text plain dictionaries: a step has tens of rows here, and each costs a few lookups, where arrays over
all rows cost ten times that before they do anything. An entry takes about 100 bytes, a token's keys and values take a
hundred times that. Of the ring arrays of one size: it holds a million tokens, whatever rows there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.core.guide import Guide
from paceline.core.plan import DRAFT_KINDS, DraftTally, StepPlan, draft_depth
from paceline.runner.device_rows import DeviceRows, Drafts, FlatBatch
from paceline.runner.sampling.sampler import Sampler

Index = NDArray[np.int64]
Bool = NDArray[np.bool_]
Counts = NDArray[np.int32] | NDArray[np.int64]

THREE, SIX = 3, 6  # tokens of a text that are looked for in earlier ones
_PRIME, _FOLD, _MASK = 0x9E3779B97F4A7C15, 29, (1 << 64) - 1
LONGEST = 7  # tokens that are compared to tell how long a match is
MISSED, PARTLY, WHOLLY = 0, 1, 2  # how a row's last draft fared
FATES = 3
OF_HISTORY = (LONGEST - 1) * FATES  # the first kind of draft from an earlier text
LENGTHS = 4  # of matches with earlier texts that are told apart
MOST_UNSEEN = 16  # steps in a row that are not looked at, while no draft is worth its time
# The first kind of draft from a model: its probability in eighths. Where there is a model, drafts from earlier texts
# are told apart by the length of the match alone, so that 32 kinds are enough.
OF_MODEL, EIGHTHS = OF_HISTORY + LENGTHS, 8
NO_STATE = -2  # of a row, from no token: not even from the one before its first
# The kinds of draft from a prediction: where the row has just got a token of it, and where it was found again.
FOLLOWED, FOUND = DRAFT_KINDS - 2, DRAFT_KINDS - 1
_SHIFT = 24  # of a token in a key: more than any vocabulary needs
_NO_TOKEN = -1


class Drafter(Protocol):
    """Guesses the next tokens of rows. What it guesses changes when tokens come, never which."""

    def leave(self, rows: DeviceRows, row: int) -> None:
        """A row has lost its owner, whose tokens are still there."""
        ...

    def join(self, rows: DeviceRows, row: int, prediction: Sequence[int] = ()) -> None:
        """A row has a new owner; all its tokens are there. `prediction`: what it is expected to say."""
        ...

    def propose(self, rows: DeviceRows, plan: StepPlan, at: Index) -> Drafts | None:
        """Drafts of the decoding rows `at`, no more than the plan allows. None: no row has any."""
        ...

    def observe(self, rows: DeviceRows, at: Index, count: Counts, verified: Index | None) -> None:
        """The rows `at` have got `count` tokens each, and this many drafts of each were verified; None: none."""
        ...

    def take_tally(self) -> DraftTally | None:
        """How drafts have fared since the last call; None: none was compared."""
        ...


@runtime_checkable
class FollowingDrafter(Drafter, Protocol):
    """One that computes beside the model: it sees what a step has computed, and draws as the sampler does."""

    def attach(self, sampler: Sampler) -> None:
        """Called once, before any row joins."""
        ...

    def fork(self, source: int, target: int) -> None:
        """The row `target`, which has joined, goes on where `source` is."""
        ...

    def follow(self, rows: DeviceRows, batch: FlatBatch) -> None:
        """The step of this batch is over; `rows.computed` counts what is right of it."""
        ...


class Prediction:
    """A text that a row is expected to say, and where in it the row is.

    The row begins at its first token. Where it says something else, its last two tokens are looked for, from where it
    was on: an edited text goes on behind the edit.
    """

    __slots__ = ("_behind", "_last", "_reached", "is_followed", "place", "tokens")

    def __init__(self, tokens: Sequence[int], said: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.place = 0  # of the token that is expected next; len(tokens): none is
        self.is_followed = False  # the row's last token was the one expected
        self._reached = 0  # behind the last token that was expected and came
        self._last = -1  # token of the row
        self._behind: dict[tuple[int, int], list[int]] = {}  # where each pair ends
        for end, pair in enumerate(pairwise(self.tokens), 2):
            self._behind.setdefault(pair, []).append(end)
        self.follow(said)

    def follow(self, new: Sequence[int]) -> None:
        """The row has got these tokens."""
        for token in new:
            self.is_followed = self.tokens[self.place : self.place + 1] == [token]
            if self.is_followed:
                self._reached = self.place = self.place + 1
            else:
                ends = self._behind.get((self._last, token), [len(self.tokens)])
                self.place = ends[min(bisect_left(ends, self._reached), len(ends) - 1)]
            self._last = token

    @property
    def kind(self) -> int:
        """Of the draft that comes next; -1: there is none."""
        if self.place == len(self.tokens):
            return -1
        return FOLLOWED if self.is_followed else FOUND

    def guess(self, count: int) -> list[int]:
        """The next tokens, as far as it goes."""
        return self.tokens[self.place : self.place + count]


class RowText:
    """The tokens of a row, where its last ones stood before, and how the guess from there fared."""

    __slots__ = ("_fours", "_pairs", "fate", "kind", "place", "prediction", "texts", "tokens")

    def __init__(self, tokens: list[int], texts: int = 0, prediction: Prediction | None = None) -> None:
        self.tokens: list[int] = []
        self.texts = texts
        self.prediction = prediction
        self.fate = PARTLY  # how the last one fared
        self._pairs: dict[int, int] = {}
        self._fours: dict[int, int] = {}
        self.kind = -1  # of the draft that comes next; -1: there is none
        self.place = 0  # where it begins
        self.add(tokens, PARTLY)

    def add(self, new: list[int], fate: int) -> None:
        """Tokens have come; the draft for what follows is found. `fate`: how the last one fared."""
        tokens, pairs, fours = self.tokens, self._pairs, self._fours
        self.fate = fate
        pair = four = found = 0
        for token in new:
            if found:  # what stood behind the key before is known now
                pairs[pair] = found
                fours[four] = found
            tokens.append(token)
            found = len(tokens)
            if found < 2:
                found = 0
                continue
            pair = tokens[-2] << _SHIFT | token
            four = -1 if found < 4 else (tokens[-4] << _SHIFT | tokens[-3]) << 2 * _SHIFT | pair
        self.kind = -1
        if not found:
            return
        place = fours.get(four, 0) or pairs.get(pair, 0)
        if place:
            length = 2
            while length < LONGEST and place > length and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            self.place, self.kind = place, (length - 2) * FATES + fate
        pairs[pair] = fours[four] = found

    def guess(self, count: int) -> list[int]:
        """The next tokens; behind the end of what is known the text is taken to repeat itself."""
        place, tokens = self.place, self.tokens
        known = tokens[place : place + count]
        while len(known) < count:
            known += tokens[place : place + count - len(known)]
        return known


class History:
    """Texts that have ended well, the newest million tokens of them, and where their threes and sixes stand."""

    def __init__(self, size: int = 1 << 20) -> None:
        # One that is none behind each text.
        self._tokens: NDArray[np.int32] = np.full(size, _NO_TOKEN, np.int32)
        self._owners: NDArray[np.int64] = np.zeros(size, np.int64)  # the number that each text was added with
        self._end = 0  # of the newest text
        self._slots = size
        self._keys: NDArray[np.uint32] = np.zeros(size, np.uint32)
        self._places: NDArray[np.int32] = np.zeros(size, np.int32)

    def add(self, tokens: Index, texts: int) -> None:
        """A text of those that share this number."""
        size = len(self._tokens)
        tokens = tokens[-size // 4 :]
        if self._end + len(tokens) + 1 > size:
            self._end = 0
        start, end = self._end, self._end + len(tokens)
        self._tokens[start:end], self._tokens[end] = tokens, _NO_TOKEN
        self._owners[start:end] = texts
        self._end = end + 1
        for length in (THREE, SIX):
            if len(tokens) > length:
                grams = np.lib.stride_tricks.sliding_window_view(tokens, length)[:-1]
                value = np.full(len(grams), texts + length, np.uint64)
                for column in grams.T:
                    value = (value ^ column.astype(np.uint64)) * np.uint64(_PRIME)
                    value ^= value >> np.uint64(_FOLD)
                slots = (value % np.uint64(self._slots)).astype(np.int64)
                self._keys[slots] = (value >> np.uint64(32)).astype(np.uint32)
                self._places[slots] = np.arange(start + length, end)

    def find(self, tokens: list[int], texts: int) -> tuple[int, int]:
        """Where the last tokens of a text stood in another one last, and how many of them did; (0, 0): nowhere."""
        for length in (SIX, THREE):
            if len(tokens) < length:
                continue
            last = tokens[-length:]
            value = texts + length
            for token in last:
                value = ((value ^ token) * _PRIME) & _MASK
                value ^= value >> _FOLD
            slot = value % self._slots
            if self._keys.item(slot) != value >> 32:
                continue
            place = self._places.item(slot)
            # Another text, of another tenant even, may have been written over it since.
            if (
                self._owners.item(place - 1) == texts
                and self._tokens[place - length : place].tolist() == last
            ):
                return place, self._length(tokens, place, length)
        return 0, 0

    def _length(self, tokens: list[int], place: int, length: int) -> int:
        most = min(LONGEST, len(tokens), place)
        while length < most and self._tokens.item(place - length - 1) == tokens[-length - 1]:
            length += 1
        return length

    def guess(self, place: int, count: int) -> list[int]:
        """What followed there, as far as that text goes."""
        found: list[int] = self._tokens[place : place + count].tolist()
        return found[: found.index(_NO_TOKEN)] if _NO_TOKEN in found else found


class NgramDrafter:
    """Makes drafts of rows, and tells how they fared."""

    def __init__(self, history: History | None = None, *, beside_model: bool = False) -> None:
        """`beside_model`: some kinds of draft are a model's (see `OF_MODEL`)."""
        self._history = history
        self._fates_of_history = 1 if beside_model else FATES
        self._texts: dict[int, RowText] = {}
        self._trust: list[float] = [0.0] * DRAFT_KINDS
        self._compared = [0] * DRAFT_KINDS
        self._equal = [0] * DRAFT_KINDS
        self._any = False  # something was compared since the last tally
        self._has_room = True  # for drafts, in the plan of this step
        self._unseen = 0  # steps whose tokens were not looked at

    def join(self, rows: DeviceRows, row: int, prediction: Sequence[int] = ()) -> None:
        known: list[int] = rows.tokens[row, : rows.num_tokens[row]].tolist()
        expected = Prediction(prediction, known[rows.num_prompt[row] :]) if prediction else None
        self._texts[row] = text = RowText(known, rows.texts.item(row), expected)
        if expected is not None and expected.kind >= 0:
            text.kind = expected.kind

    def leave(self, rows: DeviceRows, row: int) -> None:
        if self._history is not None and rows.ended[row]:  # else it was aborted, or failed, or comes back
            self._history.add(rows.tokens[row, : rows.num_tokens[row]], rows.texts.item(row))

    def promises(self, at: Index) -> list[float]:
        """The trust in the next draft of each row; that of a prediction that is being followed is certain."""
        kinds = [self._texts[row].kind for row in at.tolist()]
        return [0.0 if kind < 0 else 1.0 if kind == FOLLOWED else self._trust[kind] for kind in kinds]

    def propose(self, rows: DeviceRows, plan: StepPlan, at: Index) -> Drafts | None:
        if len(plan.trust):
            self._trust = plan.trust.tolist()
        self._has_room = plan.draft_width > 0
        if not self._has_room:
            return None
        if self._unseen:
            self._see(rows, at, [0] * len(at))
        depths = [draft_depth(trust, plan.draft_floor, plan.draft_width) for trust in self._trust]
        texts = [self._texts[row] for row in at.tolist()]
        counts = [depths[text.kind] if text.kind >= 0 else 0 for text in texts]
        if not any(counts):
            return None
        room = np.where(rows.ended[at], 0, rows.limit[at] - rows.num_tokens[at] - 1).tolist()
        counts = [min(count, most) for count, most in zip(counts, room, strict=True)]
        if sum(counts) > plan.draft_tokens:
            counts = self._likeliest(texts, counts, plan.draft_tokens)
        if not any(counts):
            return None
        tokens: Index = np.zeros((len(at), plan.draft_width), np.int64)
        for number, count in enumerate(counts):
            if count:
                guess = self._guess(texts[number], count)
                counts[number] = len(guess)  # an earlier text may end before that
                tokens[number, : len(guess)] = guess
        made: Index = np.array(counts, np.int64)
        is_predicted = [text.kind >= FOLLOWED for text in texts]
        return Drafts(tokens, made, np.where(is_predicted, made, 0) if any(is_predicted) else None)

    def _guess(self, text: RowText, count: int) -> list[int]:
        if text.kind >= FOLLOWED and text.prediction is not None:
            return text.prediction.guess(count)
        if text.kind >= OF_HISTORY and self._history is not None:
            return self._history.guess(text.place, count)
        return text.guess(count)

    def _likeliest(self, texts: list[RowText], counts: list[int], most: int) -> list[int]:
        """Of these drafts the likeliest; one is never likelier than the one before it."""
        ranked = sorted(
            (-(self._trust[text.kind] ** (depth + 1)), number)
            for number, (text, count) in enumerate(zip(texts, counts, strict=True))
            for depth in range(count)
        )
        kept = [0] * len(counts)
        for _, number in ranked[:most]:
            kept[number] += 1
        return kept

    def observe(self, rows: DeviceRows, at: Index, count: Counts, verified: Index | None) -> None:
        if not self._has_room and self._unseen < min(len(at), MOST_UNSEEN) - 1:
            # Many rows are looked at now and then, so that looking costs as much as one of them.
            self._unseen += 1
            return
        self._see(rows, at, [0] * len(at) if verified is None else verified.tolist())

    def _see(self, rows: DeviceRows, at: Index, drafts: list[int]) -> None:
        """Take in the tokens that have come since these rows were looked at, and find what may follow them."""
        self._unseen = 0
        ends = rows.num_tokens[at]
        last = rows.tokens[at, ends - 1].tolist()
        for number, (row, end) in enumerate(zip(at.tolist(), ends.tolist(), strict=True)):
            text, new = self._texts[row], [last[number]]
            known = len(text.tokens)
            if known == end:
                continue
            if known + 1 != end:
                new = rows.tokens[row, known:end].tolist()
            text.add(new, self._fate(text, new, drafts[number]))
            if text.prediction is not None:
                text.prediction.follow(new)
            self._choose(text)

    def _choose(self, text: RowText) -> None:
        """Take the draft of an earlier text, or of the row's prediction, where that is more trusted than the row's own.
        A prediction that is being followed comes first: it is what the request asked for."""
        if self._history is not None:
            place, length = self._history.find(text.tokens, text.texts)
            fates = self._fates_of_history
            kind = OF_HISTORY + min(length - THREE, LENGTHS - 1) * fates + text.fate % fates
            if length and (text.kind < 0 or self._trust[kind] > self._trust[text.kind]):
                text.kind, text.place = kind, place
        if text.prediction is not None and text.prediction.kind >= 0:
            kind = text.prediction.kind
            if kind == FOLLOWED or text.kind < 0 or self._trust[kind] >= self._trust[text.kind]:
                text.kind = kind

    def _fate(self, text: RowText, new: list[int], drafts: int) -> int:
        """Count drafts that were verified; of the others the first, which is compared with the token that came."""
        kind = text.kind
        if kind < 0 or not new:
            return PARTLY
        if drafts:
            compared, equal = min(len(new), drafts), min(len(new) - 1, drafts)
        else:
            compared, equal = 1, int(self._guess(text, 1) == new[:1])
        self._compared[kind] += compared
        self._equal[kind] += equal
        self._any = True
        return WHOLLY if equal == compared else PARTLY if equal else MISSED

    def take_tally(self) -> DraftTally | None:
        if not self._any:
            return None
        tally = DraftTally(np.array(self._compared, np.int32), np.array(self._equal, np.int32))
        self._compared, self._equal, self._any = [0] * DRAFT_KINDS, [0] * DRAFT_KINDS, False
        return tally


class Forced(NamedTuple):
    """What guides are certain of in a step."""

    rows: Bool  # of the decoding rows those whose drafts it is
    certain: int  # tokens, also those that there is no room for

    def taken(self, count: Counts) -> int:
        """How many tokens came that had to, beside the one that each row draws."""
        return int(np.maximum(count[: len(self.rows)][self.rows] - 1, 0).sum())


def follow_guides(
    guides: Mapping[int, Guide],
    rows: DeviceRows,
    plan: StepPlan,
    at: Index,
    drafts: Drafts | None,
) -> tuple[Drafts | None, Forced]:
    """The drafts of the rows `at`, where those with a guide have what it forces, or of a guess what it allows."""
    is_forced, certain = np.zeros(len(at), np.bool_), 0
    if drafts is None:
        drafts = Drafts(np.zeros((len(at), plan.draft_width), np.int64), np.zeros(len(at), np.int64))
    tokens, counts, predicted = drafts
    left = plan.draft_tokens - int(counts.sum())
    for number, row in enumerate(at.tolist()):
        guide = guides.get(row)
        if guide is None or rows.ended[row]:
            continue
        before = int(counts[number])
        found = guide.forced()
        if found:
            is_forced[number] = True
            certain += len(found)
            room = int(rows.limit[row] - rows.num_tokens[row]) - 1
            found = found[: max(0, min(room, plan.draft_width, left + before))]
        elif before:
            found = tokens[number, :before].tolist()
            found = found[: guide.accepts(found)]
        while found and is_over_behind(guide, found):
            found.pop()  # the last token of a structure is drawn: nothing is drawn behind it
        tokens[number, : len(found)] = found
        counts[number] = len(found)
        left += before - len(found)
        if predicted is not None:
            predicted[number] = 0 if is_forced[number] else min(int(predicted[number]), len(found))
    return (drafts if counts.any() else None), Forced(is_forced, certain)


def is_over_behind(guide: Guide, tokens: list[int]) -> bool:
    """Whether a structure is complete with these tokens."""
    trial = guide.copy()
    trial.consume(tokens)
    return trial.is_over
