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
from paceline.text.stop import StopMatcher, StopResult
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
        self._ended: TextDelta | None = None

    @property
    def num_output(self) -> int:
        """Output tokens taken in, none past the end of a stop string."""
        return self._num_output

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """The text these tokens made certain. Tokens behind a stop string are ignored.

        `ends_with_stop_token`: the last of them is the token that ended the request (end of text or one of
        `stop_token_ids`); it is counted, but shown only where stop strings are.
        """
        if self._ended is not None:
            return TextDelta(text="", stopped_at=self._ended.stopped_at, stop_reason=self._ended.stop_reason)
        if not self._is_text:
            self._num_output += len(token_ids)
            return TextDelta(text="")
        hidden = len(token_ids) - 1 if ends_with_stop_token and not self._shows_stop_token else None
        found: list[str] = []
        for position, token in enumerate(token_ids):
            text = "" if position == hidden else self._detokenizer.push((token,))
            self._num_output += 1
            result = self._match(text)
            found.append(result.emit)
            if result.stopped:
                break
        return self._delta("".join(found))

    def finish(self) -> TextDelta:
        """What was held back, once no more tokens come."""
        if self._ended is not None or not self._is_text:
            return TextDelta(text="")
        result = self._match(self._detokenizer.flush())
        held = self._matcher.flush() if self._matcher is not None else ""
        return self._delta(result.emit + held)

    def _match(self, text: str) -> StopResult:
        """A stop string counts when it ends behind the first `min_tokens` tokens."""
        if self._matcher is None:
            return StopResult(emit=text)
        result = self._matcher.push(text, may_stop=self._num_output > self._min_tokens)
        if result.stop is not None:
            self._ended = TextDelta(text="", stopped_at=self._num_output, stop_reason=result.stop)
        return result

    def _delta(self, text: str) -> TextDelta:
        if self._ended is None:
            return TextDelta(text=text)
        return TextDelta(text=text, stopped_at=self._ended.stopped_at, stop_reason=self._ended.stop_reason)
