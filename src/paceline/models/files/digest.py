"""Whether two machines have the same model: a digest of its files, of samples where they are large."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

PATTERNS = ("*.safetensors", "*.gguf", "config.json", "tokenizer.json")
WHOLE_BYTES = 1 << 16  # of a file's beginning, which names its tensors
SAMPLES, SAMPLE_BYTES = 256, 256  # at even distances of the rest


@lru_cache(maxsize=8)
def model_digest(path: Path) -> str:
    """Of a model's folder, or of its one file."""
    files = [each for pattern in PATTERNS for each in sorted(path.glob(pattern))] if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        if file.is_file():
            _add(digest, file, name=file.name if path.is_dir() else "")
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, file: Path, name: str) -> None:
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        digest.update(f"{name} {size}\n".encode())
        digest.update(os.pread(opened.fileno(), WHOLE_BYTES, 0))
        if size > WHOLE_BYTES:
            for place in range(1, SAMPLES + 1):
                at = max(0, size * place // SAMPLES - SAMPLE_BYTES)
                digest.update(os.pread(opened.fileno(), SAMPLE_BYTES, at))
