"""Pictures that a command is given, as parts of a message that a model here and a server elsewhere read alike."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from paceline.config.server import split_list
from paceline.errors import InputError, InvalidImage


def content_with(text: str, images: str | None) -> Any:
    """A message with these files before its text; the text alone without any."""
    if not images:
        return text
    return [*(_part(Path(name).expanduser()) for name in split_list(images)), {"type": "text", "text": text}]


def _part(path: Path) -> dict[str, Any]:
    from paceline.models.media.headers import read_header

    try:
        data = path.read_bytes()
        kind = read_header(data).media_type
    except OSError as error:
        raise InputError(f"--image {path}: {error.strerror or error}") from None
    except InvalidImage as error:
        raise InputError(f"--image {path}: {error}") from None
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
