"""One branch of a request as it grows: tokens in, text out, and how it ended.

Shared by everything that turns the engine's tokens into outputs. A stop string cuts the branch at the token that
completed it, and later tokens are dropped; the owner of the branch tells the engine. Knows no events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.plan import RowLogprobs
from paceline.core.request import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.llm.outputs import CompletionOutput, Logprob, ToolCall
from paceline.text.answer import AnswerEvent, AnswerForm, AnswerReader
from paceline.text.reasoning import Reasoned
from paceline.text.stream import TextStream
from paceline.text.tokenizer import Tokenizer
from paceline.text.tools.scanner import CallArguments, CallBegin, CallEnd, Said

_STOP, _ERROR = FinishReason.STOP.value, FinishReason.ERROR.value
# Details of an abort: its time was up; its owner ended it; it was held and nothing came of it.
DEADLINE, PRUNED, HOLD_OVER = "deadline", "pruned", "hold_over"


class BranchText:
    """Brings one `CompletionOutput` up to date; its text is handed out in pieces and not kept here."""

    __slots__ = (
        *("_call", "_early", "_ends", "_reader", "_stop_ids", "_stream", "_tokenizer"),
        *("cut_at", "events", "num_fixed", "output", "sampling"),
    )

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        form: AnswerForm | None = None,
    ) -> None:
        self.output = CompletionOutput(index=index)
        if sampling.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self.sampling = sampling
        self.cut_at: int | None = None  # the number of tokens after which a stop string ended the branch
        self.num_fixed = 0  # tokens up to the last one that was put in: no stop string begins among them
        self._early: list[tuple[RowLogprobs, int]] = []  # of tokens behind some that have yet to be put in
        self._tokenizer = tokenizer
        self._stop_ids = sampling.stop_token_ids
        self._ends = () if tokenizer is None else tokenizer.eos_token_ids
        self._stream: TextStream | None = None
        self._reader: AnswerReader | None = None  # where an answer may be more than text
        self._call: tuple[CallBegin, list[str]] | None = None  # that has begun, and its arguments
        # What the last `push` or `finish` brought, where there is a reader.
        self.events: list[AnswerEvent] = []
        if tokenizer is not None and sampling.detokenize:
            shown = frozenset() if form is None else form.shown_ids
            self._stream = TextStream(tokenizer, prompt_ids, sampling, shown)
            self._reader = None if form is None else AnswerReader(form)

    @property
    def has_text(self) -> bool:
        return self._stream is not None

    @property
    def call_outcomes(self) -> Mapping[str, int]:
        return {} if self._reader is None else self._reader.call_outcomes

    def push(self, tokens: list[int], *, ends_with_stop_token: bool = False) -> str:
        """The text these tokens made certain; sets `cut_at` when they complete a stop string."""
        if self.cut_at is not None:
            return ""
        output = self.output
        output.token_ids += tokens
        output.num_generated += len(tokens)
        stream = self._stream
        if stream is None:
            return ""
        # An answer whose structure is complete ends with a token of its text.
        is_stop = ends_with_stop_token and (tokens[-1] in self._stop_ids or tokens[-1] in self._ends)
        if self._reader is not None:
            text = self._read(stream, self._reader, tokens, is_stop)
        else:
            text = stream.push(tokens, ends_with_stop_token=is_stop)
        if stream.stopped_at is not None:
            self._cut(stream)
        return text

    def _read(self, stream: TextStream, reader: AnswerReader, tokens: list[int], is_stop: bool) -> str:
        """The text among what these tokens brought; `events` has all of it."""
        self.events, done = [], 0
        # One by one, so that the tokens of the reasoning are counted.
        while done < len(tokens) and reader.may_reason and stream.stopped_at is None:
            was_reasoning, is_last = reader.is_reasoning, done + 1 == len(tokens)
            text = stream.push(tokens[done : done + 1], ends_with_stop_token=is_stop and is_last)
            self.events += reader.push(text)
            self.output.num_reasoning_tokens += was_reasoning or reader.is_reasoning
            done += 1
        if done < len(tokens):
            self.events += reader.push(stream.push(tokens[done:], ends_with_stop_token=is_stop))
        return self._note(self.events)

    def _note(self, events: Sequence[AnswerEvent]) -> str:
        """Bring the output up to date; returns its new text."""
        output, texts = self.output, []
        for event in events:
            match event:
                case Said(text):
                    texts.append(text)
                case Reasoned(text):
                    output.reasoning = (output.reasoning or "") + text
                case CallBegin():
                    self._call = (event, [])
                case CallArguments(_, text) if self._call is not None:
                    self._call[1].append(text)
                case CallEnd(_, is_complete) if self._call is not None:
                    begun, pieces = self._call
                    arguments = "".join(pieces)
                    call = ToolCall(
                        id=begun.id, name=begun.name, arguments=arguments, is_complete=is_complete
                    )
                    output.tool_calls += (call,)
        return "".join(texts)

    def begin_with(self, parent: BranchText, at: int, append: Sequence[int] = ()) -> str:
        """Start as a branch of another one, with its first `at` tokens and `append` behind them; returns the text."""
        output, taken = self.output, parent.output.token_ids[:at]
        has_logprobs = output.logprobs is not None and parent.output.logprobs is not None
        if has_logprobs:
            output.logprobs = (parent.output.logprobs or [])[:at]
        # Where a stop string has ended the parent, that one is over.
        fixed = at if parent.cut_at is not None and at >= parent.cut_at else min(parent.num_fixed, at)
        text = self.inject(taken[:fixed])
        output.token_ids += taken[fixed:]
        if self._stream is not None:
            text += self._read_text(self._stream.repeat(taken[fixed:]))
        if append:
            text += self.inject(append)
        if has_logprobs and output.logprobs is not None:  # of what was put in, and what is not known yet
            output.logprobs += [{} for _ in range(len(output.token_ids) - len(output.logprobs))]
            output.cumulative_logprob = known_logprob(output)
        return text

    def inject(self, tokens: Sequence[int]) -> str:
        """Tokens were put in behind what the branch has; one that was held or cut goes on. Returns the new text."""
        output = self.output
        self.cut_at = output.held = output.stop_reason = None
        output.token_ids += tokens
        if tokens:
            self.num_fixed = len(output.token_ids)
            if output.logprobs is not None:
                output.logprobs += [{} for _ in range(len(output.token_ids) - len(output.logprobs))]
        early, self._early = self._early, []
        for found, number in early:
            self.push_logprobs(found, number)
        return "" if self._stream is None else self._read_text(self._stream.inject(tokens))

    def hold(self, reason: str) -> None:
        """The branch has come to its end and is kept there."""
        output = self.output
        output.held = _STOP if self.cut_at is not None else reason
        output.num_holds += 1
        self._early.clear()  # of tokens behind its end
        self._drop_logprobs()
        self._note_stop_token(output.held)

    def _read_text(self, text: str) -> str:
        if self._reader is None:
            return text
        self.events = list(self._reader.push(text))
        return self._note(self.events)

    def push_logprobs(self, found: RowLogprobs, number: int) -> None:
        """What is known of output token `number`, in order; others are left out.

        With the first token behind some that are put in, it comes before those.
        """
        output = self.output
        if output.logprobs is None:
            return
        if output.held is not None or number > len(output.logprobs):
            self._early.append((found, number))
            return
        if self.cut_at is not None or number != len(output.logprobs):
            return
        output.logprobs.append(logprob_entry(self._tokenizer, found))
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + found.logprob

    def finish(self, reason: str, detail: str) -> str:
        """The branch has ended: the rest of its text."""
        output, rest = self.output, ""
        if self._stream is not None and self.cut_at is None:
            rest = self._stream.finish()
            if self._stream.stopped_at is not None:  # completed by characters that were held back until now
                self._cut(self._stream)
        if self._reader is not None:
            self.events = [*self._reader.push(rest), *self._reader.flush()]
            rest = self._note(self.events)
        self._drop_logprobs()
        output.finish_reason = reason if self.cut_at is None else _STOP
        if detail == HOLD_OVER:  # it had come to its end before
            output.finish_reason = output.held or reason
        elif detail == PRUNED:
            output.finish_reason, output.stop_reason = reason, PRUNED
        elif reason == _ERROR:
            output.error = detail
        elif detail == DEADLINE and output.finish_reason != _STOP:
            output.stop_reason = DEADLINE
        else:
            self._note_stop_token(reason)
        output.held = None
        return rest

    def _note_stop_token(self, reason: str) -> None:
        output = self.output
        if reason == _STOP and self.cut_at is None and output.token_ids:
            last = output.token_ids[-1]
            if last in self._stop_ids:
                output.stop_reason = last

    def _cut(self, stream: TextStream) -> None:
        """The output ends at the token that completed a stop string."""
        self.cut_at = stream.stopped_at
        self.output.num_generated -= len(self.output.token_ids) - (self.cut_at or 0)
        del self.output.token_ids[self.cut_at :]
        self._drop_logprobs()
        self.output.stop_reason = stream.stop_reason

    def _drop_logprobs(self) -> None:
        """Of tokens that are the output's no more: a step may bring several, of which the first completes a stop."""
        output, count = self.output, len(self.output.token_ids)
        if output.logprobs is not None and len(output.logprobs) > count:
            del output.logprobs[count:]
            output.cumulative_logprob = known_logprob(output)


def known_logprob(output: CompletionOutput) -> float:
    """The sum of the logprobs that are known."""
    known = zip(output.token_ids, output.logprobs or (), strict=False)
    return sum(entry[token].logprob for token, entry in known if entry)


def logprob_entry(tokenizer: Tokenizer | None, found: RowLogprobs) -> dict[int, Logprob]:
    """How likely a token was, and which were likelier, by token id."""
    chosen = _logprob(tokenizer, found.token, found.logprob, found.rank)
    chosen.is_drafted = found.is_drafted
    entry = {found.token: chosen}
    for rank, (token, value) in enumerate(zip(found.top_tokens, found.top_logprobs, strict=True), 1):
        entry.setdefault(token, _logprob(tokenizer, token, value, rank))
    return entry


def _logprob(tokenizer: Tokenizer | None, token: int, value: float, rank: int) -> Logprob:
    text = None if tokenizer is None else tokenizer.token_text(token)
    return Logprob(logprob=value, rank=rank, decoded_token=text)
