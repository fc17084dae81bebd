"""From what a caller writes to what the engine takes: token ids, and sampling that is complete and checked.

Everything a caller can get wrong is found here, before the engine hears of the request.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from paceline.core.sampling import PARAMETERS, Offer, SamplingParams
from paceline.core.stretch import MediaPart, ModulePart, PromptParts
from paceline.errors import InvalidRequest, is_off, not_supported
from paceline.llm.arguments import PROMPT_KEYS
from paceline.models.media.pictures import OpenPicture, PictureReader, PlacedPicture
from paceline.models.media.sources import take_pictures
from paceline.text.answer import AnswerForm
from paceline.text.dialect import ChatRequest, Dialect
from paceline.text.picture_marks import PictureMarks
from paceline.text.placed_texts import PlacedPrompt, PlacedTexts, encode_placed, joined
from paceline.text.tokenizer import RenderedPrompt, Tokenizer

# Words that must not be produced, as the token sequences that would spell them.


MAX_WORD_CHARS = 256


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Id sequences for each word: as it begins a text, and as it follows a space where that is another token.

    The second counts only where the space changes the first token and not the number of tokens; otherwise it is
    the same word behind a space token, which the first sequence forbids already.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        text = word.lstrip()
        if not text or len(word) > MAX_WORD_CHARS:
            message = f"a bad word has 1 to {MAX_WORD_CHARS} characters, not only spaces"
            raise InvalidRequest(message, param="bad_words")
        plain = tuple(tokenizer.encode(text, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + text, add_special_tokens=False))
        if plain:
            found.append(plain)
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(found)


Prompt = str | Sequence[int] | Mapping[str, Any]
MAX_CHARS_PER_TOKEN = 64  # no tokenizer makes fewer tokens of a text: longer ones are refused unread


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request the engine can take as it is."""

    text: str | None
    token_ids: list[int]
    sampling: SamplingParams
    form: AnswerForm | None = None  # of a conversation whose answer may be more than text
    pictures: tuple[PlacedPicture, ...] = ()
    media: tuple[MediaPart, ...] = ()  # what an engine gets of them, once they are decoded
    modules: tuple[ModulePart, ...] = ()  # texts of the prompt that are placed

    def lean(self) -> PreparedRequest:
        """The same without pixels and files, once an engine has them."""
        if not self.pictures:
            return self
        return replace(self, pictures=tuple(each.lean() for each in self.pictures), media=())

    @property
    def parts(self) -> PromptParts:
        """What an engine gets beside the tokens."""
        return PromptParts(self.media, self.modules)

    @property
    def num_image(self) -> int:
        """Tokens of the prompt that stand for pictures."""
        return sum(picture.num_tokens for picture in self.pictures)


class PromptReader:
    """Reads prompts for one model."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int, seed: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)

    def read(self, prompt: Prompt, sampling: SamplingParams) -> PreparedRequest:
        """A prompt as text, as ids, or as a mapping with `prompt` or `prompt_token_ids`."""
        text, ids = self._text_and_ids(prompt)
        return self.prepare(text, ids, sampling)

    def prepare(self, text: str | None, ids: list[int], sampling: SamplingParams) -> PreparedRequest:
        """A prompt that is tokens already."""
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        is_plain = set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self._vocab_size
        for token in () if is_plain else ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                message = f"token id {token!r} is not in [0, {self._vocab_size})"
                raise InvalidRequest(message, param="prompt")
        return PreparedRequest(text=text, token_ids=ids, sampling=self._complete(sampling, len(ids)))

    def read_inserted(self, given: str | Sequence[int], param: str) -> list[int]:
        """What is put into an output, as text or ids."""
        if given == "":
            return []
        if isinstance(given, str):
            if self._tokenizer is None:
                raise InvalidRequest("text needs a tokenizer; give token ids", param=param)
            limit = self._max_model_len * MAX_CHARS_PER_TOKEN
            return self._tokenizer.encode(given, add_special_tokens=False, max_chars=limit, param=param)
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise InvalidRequest(
                f"{param} is text or a list of token ids, not {type(given).__name__}", param=param
            )
        ids = list(cast("Sequence[int]", given))
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                message = f"token id {token!r} is not in [0, {self._vocab_size})"
                raise InvalidRequest(message, param=param)
        return ids

    def read_placed(self, parts: Sequence[tuple[str, bool]], param: str) -> PlacedPrompt:
        """The same as texts in lines of their own, each with whether it is placed: those are tokenised alone."""
        if self._tokenizer is None:
            raise InvalidRequest("text needs a tokenizer; give token ids", param=param)
        limit = self._max_model_len * MAX_CHARS_PER_TOKEN
        size = sum(len(text) for text, _ in parts)
        if size > limit:
            raise InvalidRequest(f"{param} has {size} characters, at most {limit} are accepted", param=param)
        return joined(self._tokenizer, parts, "\n")

    def read_changes(
        self, sampling: SamplingParams, changes: Mapping[str, Any]
    ) -> tuple[SamplingParams, dict[str, Any]]:
        """The sampling of a branch that differs from its parent's, and what an engine has to know of it."""
        for name in changes:
            if name not in PARAMETERS or not PARAMETERS[name].offered & Offer.FORK:
                raise InvalidRequest(f"{name} of a branch cannot differ from its parent's", param=name)
        if not changes and (sampling.temperature == 0 or sampling.seed is not None):
            return sampling, {}
        given = dict(changes)
        # The least counts from the request's first token.
        asked = replace(sampling, **{"min_tokens": 0, **given})
        asked.check_vocabulary(self._vocab_size)
        if asked.stop and self._tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer; use stop_token_ids", param="stop")
        if asked.temperature > 0 and asked.seed is None:
            given["seed"] = self._seeds.getrandbits(63)
        own = replace(
            asked,
            seed=given.get("seed", asked.seed),
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
        )
        return own, {name: value for name, value in given.items() if not PARAMETERS[name].is_text}

    def _text_and_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            for key, hint in PROMPT_KEYS.items():
                if not is_off(prompt.get(key)):
                    raise InvalidRequest(not_supported(key, hint), param=key)
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is not None and not isinstance(ids, str | Mapping):
                return (text if isinstance(text, str) else None), self._text_and_ids(ids)[1]
            if isinstance(text, str):
                return self._text_and_ids(text)
            message = "a prompt mapping needs `prompt` with text or `prompt_token_ids` with a list of ids"
            raise InvalidRequest(message, param="prompt")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequest(
                    "the engine was started without a tokenizer: give token ids", param="prompt"
                )
            limit = self._max_model_len * MAX_CHARS_PER_TOKEN
            return prompt, self._tokenizer.encode(prompt, max_chars=limit)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return None, list(cast("Sequence[int]", prompt))
        raise InvalidRequest(
            f"a prompt is text or a list of token ids, not {type(prompt).__name__}", param="prompt"
        )

    def _complete(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """Fill in what a request leaves open: the rest of the context, a seed, ids for words."""
        room = self._max_model_len - num_prompt
        if sampling.pooling is not None:
            if room < 0:
                raise InvalidRequest(
                    f"This model's maximum context length is {self._max_model_len} tokens; the input has {num_prompt}",
                    param="input",
                )
            sampling.check_vocabulary(self._vocab_size)
            return sampling
        if room < 1:
            raise InvalidRequest(
                f"This model's maximum context length is {self._max_model_len} tokens; the prompt has "
                f"{num_prompt} and leaves no room for an answer",
                param="prompt",
            )
        changes: dict[str, Any] = {}
        if sampling.max_tokens > room:
            changes["max_tokens"] = room
            changes["min_tokens"] = min(sampling.min_tokens, room)
        if sampling.seed is None and sampling.temperature > 0:
            # Fixed now: a request that is computed again after a preemption draws the same tokens.
            changes["seed"] = self._seeds.getrandbits(63)
        words = [word for word in sampling.bad_words if isinstance(word, str)]
        if words:
            if self._tokenizer is None:
                raise InvalidRequest("bad_words as text need a tokenizer", param="bad_words")
            given = [word for word in sampling.bad_words if not isinstance(word, str)]
            changes["bad_words"] = (*given, *bad_word_ids(self._tokenizer, words))
        if sampling.prediction:
            changes["prediction"] = self._prediction(sampling.prediction)
        if sampling.stop and self._tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer; use stop_token_ids", param="stop")
        sampling.check_vocabulary(self._vocab_size)
        return replace(sampling, **changes) if changes else sampling

    def _prediction(self, given: str | tuple[int, ...]) -> tuple[int, ...]:
        """As token ids, no more of them than a sequence can have: it decides nothing but when tokens come."""
        if not isinstance(given, str):
            return given[: self._max_model_len]
        if self._tokenizer is None:
            raise InvalidRequest("prediction as text needs a tokenizer; give token ids", param="prediction")
        limit = self._max_model_len * MAX_CHARS_PER_TOKEN
        ids = self._tokenizer.encode(given, add_special_tokens=False, max_chars=limit, param="prediction")
        return tuple(ids[: self._max_model_len])


Messages = Sequence[Mapping[str, Any]]


class RenderedChat(NamedTuple):
    """A conversation as the engine reads it."""

    chat: ChatRequest
    ids: list[int]
    pictures: tuple[PlacedPicture, ...] = ()
    modules: tuple[ModulePart, ...] = ()


class ChatPrompts:
    """Renders conversations for one model. `settings` as in `Dialect`."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, pictures: PictureReader | None = None, **settings: Any
    ) -> None:
        """`pictures`: of a model that sees them."""
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._settings = {**settings, "takes_pictures": pictures is not None}
        self._own = None if tokenizer is None else Dialect(tokenizer, **self._settings)
        self._marks = None
        if tokenizer is not None and pictures is not None:
            self._marks = PictureMarks(tokenizer, pictures.settings)

    def render(
        self,
        messages: Messages,
        *,
        template: str | None = None,
        is_local: bool = False,
        placed: PlacedTexts | None = None,
        **options: Any,
    ) -> RenderedChat:
        """The prompt and its token ids, by the model's template or another; `options` as in `Dialect.read`.

        Of pictures the headers are read, so that what they cost is known; see `decoded`. `is_local`: they may be
        paths and pictures of Pillow. `placed`: texts that marks in the messages stand for; no pictures beside them.
        """
        tokenizer, chosen = self._tokenizer, self._own
        if tokenizer is None or chosen is None:
            raise InvalidRequest(
                "chat needs a tokenizer; the engine was started without one", param="messages"
            )
        if template is not None:
            chosen = Dialect(tokenizer, source=template, **self._settings)
        opened: list[OpenPicture] = []
        if self._pictures is not None:
            taken, found = take_pictures(messages, most=self._pictures.limit, is_local=is_local)
            messages, opened = taken, [self._pictures.open(picture) for picture in found]
        chat = chosen.read(messages, **options)
        if placed is not None:
            ids, modules = encode_placed(tokenizer, chat.prompt, placed)
            text = placed.put_into(chat.prompt.text)
            return RenderedChat(replace(chat, prompt=RenderedPrompt(text=text)), ids, modules=modules)
        ids = tokenizer.encode_template(chat.prompt)
        if self._marks is None or not opened:
            return RenderedChat(chat, ids)
        ids, starts = self._marks.widen(ids, [each.size for each in opened])
        seen = (PlacedPicture(opened=each, starts=own) for each, own in zip(opened, starts, strict=True))
        return RenderedChat(chat, ids, tuple(seen))

    def priced(self, request: PreparedRequest) -> PreparedRequest:
        """The request with what is known of its pictures before they are decoded: enough for an estimate."""
        if self._pictures is None or not request.pictures:
            return request
        parts: list[MediaPart] = []
        for picture in request.pictures:
            parts += picture.parts(self._pictures.named(picture.opened))
        return replace(request, media=tuple(parts))

    def decoded(self, request: PreparedRequest, tenant: str) -> PreparedRequest:
        """The request with the pixels of its pictures. Takes time; raises InvalidImage."""
        if self._pictures is None or not request.pictures:
            return request
        parts: list[MediaPart] = []
        for picture in request.pictures:
            parts += picture.parts(self._pictures.prepare(picture.opened, tenant))
        return replace(request, media=tuple(parts))


def prepared_chat(reader: PromptReader, rendered: RenderedChat, sampling: SamplingParams) -> PreparedRequest:
    """A rendered conversation that the engine can take, with the form of its answer."""
    chat, ids, pictures, modules = rendered
    if chat.structure is not sampling.structured_outputs:
        sampling = replace(sampling, structured_outputs=chat.structure)
    prepared = reader.prepare(chat.prompt.text, ids, sampling)
    return replace(prepared, form=chat.form, pictures=pictures, modules=modules)
