"""A file seen as bytes without reading it: pages come in when they are looked at. Read-only."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.errors import CheckpointError


def map_file(path: Path) -> NDArray[np.uint8]:
    """The file's bytes. The mapping lives as long as any view of it."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise CheckpointError(f"{path}: cannot be read: it is not a file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise CheckpointError(f"{path}: is empty; download it again")
            return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
