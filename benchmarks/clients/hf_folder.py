"""Model folders for the clients: the default model in float32, and a small one that only looks like it.

The first holds the numbers of the GGUF file, dequantised, so that the server and transformers can be asked about the
very same weights. The second has its tokenizer and made-up weights (`--load-format dummy`): clients that make load
count tokens and read streams, and learn nothing from a larger model. Both are made once, complete or not at all.

    python -m benchmarks.clients.hf_folder FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

SMALL = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def hf_folder(folder: Path) -> Path:
    """The folder, made if it is not there yet."""
    if folder.exists():
        return folder
    from transformers import AutoTokenizer

    from paceline.models.files.fetch import default_model
    from paceline.models.files.open import open_checkpoint
    from tests.torch.gguf_reference import transformers_model

    file = default_model()
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(unfinished)
    transformers_model(open_checkpoint(str(file))).save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def small_folder(work: Path) -> Path:
    """A model of two narrow layers with the tokenizer of the default model, without weights."""
    folder, whole = work / "small", hf_folder(work / "smollm2-float32")
    if folder.exists():
        return folder
    unfinished = folder.with_name("small.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(whole, unfinished, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((whole / "config.json").read_text())
    (unfinished / "config.json").write_text(json.dumps(config | SMALL))
    unfinished.rename(folder)
    return folder


if __name__ == "__main__":
    print(hf_folder(Path(sys.argv[1])))
