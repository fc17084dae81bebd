"""How a model's prompt shows a picture: the tokens that stand for it, and which of them become vectors.

A chat template writes one mark for a picture. It is a control token, so user text can never spell it. Here it becomes
as many tokens as the picture needs, between the model's own marks of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import InputError, InvalidRequest
from paceline.models.media.picture_settings import MediaSettings, TileSettings
from paceline.models.media.sizes import MediaSize
from paceline.text.tokenizer import RenderedPrompt, Tokenizer

TILE_MARK, PATCH_MARK = "<image>", "<|image_pad|>"
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class PictureMarks:
    """Those of one model."""

    def __init__(self, tokenizer: Tokenizer, settings: MediaSettings) -> None:
        """Raises InputError for a tokenizer without the model's mark."""
        self._tokenizer = tokenizer
        self._is_tiled = isinstance(settings, TileSettings)
        text = TILE_MARK if self._is_tiled else PATCH_MARK
        if text not in tokenizer.control_tokens:
            raise InputError(f"the tokenizer has no token {text}, which stands for pictures in this model")
        self.text = text
        self.token_id = tokenizer.control_tokens[text]
        self._known: dict[tuple[int, int, int], tuple[list[int], tuple[int, ...]]] = {}

    def widen(
        self, ids: Sequence[int], sizes: Sequence[MediaSize]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """The prompt with the tokens of its pictures, and where the vectors of each picture's items begin."""
        marks = [index for index, token in enumerate(ids) if token == self.token_id]
        if len(marks) != len(sizes):
            message = (
                f"the model's chat template shows {len(marks)} of {len(sizes)} pictures; "
                "put pictures into messages of the user"
            )
            raise InvalidRequest(message, param="messages")
        found: list[int] = []
        starts: list[tuple[int, ...]] = []
        done = 0
        for mark, size in zip(marks, sizes, strict=True):
            found += ids[done:mark]
            tokens, own = self._tokens(size)
            starts.append(tuple(len(found) + start for start in own))
            found += tokens
            done = mark + 1
        found += ids[done:]
        return found, starts

    def _tokens(self, size: MediaSize) -> tuple[list[int], tuple[int, ...]]:
        """What stands for a picture of this size, and where the vectors of its items begin."""
        key = (size.rows, size.columns, size.item_outputs)
        if not self._is_tiled:
            return [self.token_id] * size.item_outputs, (0,)
        if key not in self._known:
            ids = self._tokenizer.encode_template(self._tiles(size))
            tokens: list[int] = []
            starts: list[int] = []
            for token in ids:
                if token == self.token_id:
                    starts.append(len(tokens))
                    tokens += [token] * size.item_outputs
                else:
                    tokens.append(token)
            self._known[key] = (tokens, tuple(starts))
        return self._known[key]

    def _tiles(self, size: MediaSize) -> RenderedPrompt:
        """Row by row, then the whole picture; one mark for each."""
        pieces: list[str] = []
        for row in range(1, size.rows + 1):
            for column in range(1, size.columns + 1):
                pieces += (_AROUND, f"<row_{row}_col_{column}>", self.text)
            pieces.append("\n")
        if size.rows:
            pieces.append("\n")
        pieces += (_AROUND, _WHOLE, self.text, _AROUND)
        controls: list[tuple[int, int]] = []
        at = 0
        for piece in pieces:
            if piece in self._tokenizer.control_tokens:
                controls.append((at, at + len(piece)))
            at += len(piece)
        return RenderedPrompt(text="".join(pieces), controls=tuple(controls))
