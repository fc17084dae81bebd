"""Which engines make the same text: those with one model, one version and one way to compute.

Sizes of batches, of caches and of steps are not in it: a token's numbers do not depend on them.
"""

from __future__ import annotations

import hashlib

from paceline.factory import LoadedModel
from paceline.version import __version__

SAMPLED = ("*.safetensors", "*.gguf", "config.json", "tokenizer.json")


def fingerprint_of(loaded: LoadedModel) -> str:
    """Of engines on one machine: files are told apart by their sizes and the times they were written."""
    checkpoint, hardware = loaded.checkpoint, loaded.hardware
    path = checkpoint.path
    files = [each for pattern in SAMPLED for each in sorted(path.glob(pattern))] if path.is_dir() else [path]
    facts = [
        __version__,
        repr(checkpoint.spec),
        checkpoint.kind,
        repr(sorted(checkpoint.stored.items(), key=repr)),
        hardware.device,
        hardware.dtype,
        hardware.kv_dtype,
        hardware.quantization,
        repr(sorted(each for each in hardware.runner.items() if each[0] != "threads")),
        *(f"{each.name} {each.stat().st_size} {each.stat().st_mtime_ns}" for each in files if each.exists()),
    ]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
