"""Which engines make the same text: those with one model, one version and one way to compute.

Sizes of batches, of caches and of steps are not in it: a token's numbers do not depend on them. Its first part is the
model alone, as its files have it on any machine.
"""

from __future__ import annotations

import hashlib

from paceline.factory import LoadedModel
from paceline.models.files.digest import model_digest
from paceline.version import __version__


def fingerprint_of(loaded: LoadedModel) -> str:
    checkpoint, hardware = loaded.checkpoint, loaded.hardware
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
    ]
    way = hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
    return f"{model_digest(checkpoint.path)}-{way}"
