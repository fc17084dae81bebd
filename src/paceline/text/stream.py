"""The text side of one request: tokens go in, text that is safe to show comes out.

Combines incremental decoding and stop strings, and says at which output token a stop string ended, so that the
engine can end the request there. Holds no text that was already given out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from paceline.text.detokenizer import Detokenizer
from paceline.text.stop import StopMatcher
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text. `stopped_at` counts the output tokens up to and with the one that completed `stop_reason`."""

    text: str
    stopped_at: int | None = None
    stop_reason: str | None = None


class TextStream:
    """One request's output as text. `push` every token once, in order; `finish` when the request has ended."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        if sampling.stop and not sampling.detokenize:
            raise InvalidRequest("stop strings need detokenize to be on", param="stop")
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        )
        stops, include = sampling.stop, sampling.include_stop_str_in_output
        self._matcher = StopMatcher(stops, include_stop=include) if stops else None
        self._is_text = sampling.detokenize
        self._shows_stop_token = include
        self._min_tokens = sampling.min_tokens
        self._num_output = 0
        self._stopped_at: int | None = None
        self._stop_reason: str | None = None

    @property
    def num_output(self) -> int:
        """Output tokens taken in, none past the end of a stop string."""
        return self._num_output

    @property
    def stopped_at(self) -> int | None:
        """How many output tokens there are up to and with the one that completed a stop string; None: no stop."""
        return self._stopped_at

    @property
    def stop_reason(self) -> str | None:
        return self._stop_reason

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """The text these tokens made certain. Tokens behind a stop string are ignored.

        `ends_with_stop_token`: the last of them is the token that ended the request (end of text or one of
        `stop_token_ids`); it is counted, but shown only where stop strings are.
        """
        return self._delta(self.push_text(token_ids, ends_with_stop_token=ends_with_stop_token))

    def push_text(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> str:
        """As `push`, for callers who look at `stopped_at` themselves: a step of a stream costs half of it."""
        if self._stopped_at is not None:
            return ""
        if not self._is_text:
            self._num_output += len(token_ids)
            return ""
        hidden = ends_with_stop_token and not self._shows_stop_token
        if self._matcher is None:
            self._num_output += len(token_ids)
            return self._detokenizer.push(token_ids[:-1] if hidden else token_ids)
        found: list[str] = []
        last = len(token_ids) - 1
        for position, token in enumerate(token_ids):
            text = "" if hidden and position == last else self._detokenizer.push((token,))
            self._num_output += 1
            found.append(self._match(self._matcher, text))
            if self._stopped_at is not None:
                break
        return "".join(found)

    def finish(self) -> TextDelta:
        """What was held back, once no more tokens come."""
        if self._stopped_at is not None or not self._is_text:
            return TextDelta(text="")
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return TextDelta(text=rest)
        return self._delta(self._match(self._matcher, rest) + self._matcher.flush())

    def _match(self, matcher: StopMatcher, text: str) -> str:
        """A stop string counts when it ends behind the first `min_tokens` tokens."""
        result = matcher.push(text, may_stop=self._num_output > self._min_tokens)
        if result.stop is not None:
            self._stopped_at, self._stop_reason = self._num_output, result.stop
        return result.emit

    def _delta(self, text: str) -> TextDelta:
        return TextDelta(text=text, stopped_at=self._stopped_at, stop_reason=self._stop_reason)
