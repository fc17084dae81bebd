"""Tiny random encoders, made by transformers and saved to disk, with the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, HIDDEN = 120, 32
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 66,
    "initializer_range": 0.2,
}
CONFIGS = {
    "bert": transformers.BertConfig(**_SIZES),
    "xlm-roberta": transformers.XLMRobertaConfig(**_SIZES, pad_token_id=1, type_vocab_size=1),
    "modernbert": transformers.ModernBertConfig(
        **{**_SIZES, "num_hidden_layers": 4},  # the second and third see three tokens to each side
        local_attention=6,
        initializer_cutoff_factor=3.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        cls_token_id=1,
        sep_token_id=1,
    ),
}
MODES = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}


def save_encoder(name: str, folder: Path, *, labels: int = 0, **more: Any) -> Any:
    """Write a model to `folder` and return it; `more`: of its config."""
    torch.manual_seed(3)
    config = CONFIGS[name]
    config = type(config)(**{**config.to_dict(), **more})
    if labels:
        config = type(config)(**{**config.to_dict(), "num_labels": labels})
        kind: Any = transformers.AutoModelForSequenceClassification
    else:
        kind = transformers.AutoModel
    model = kind.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key.lower() or key.endswith(
                "bias"
            ):  # made as ones and zeros, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.float().eval()


def write_pooling(folder: Path, kind: str, *, normalize: bool = True, **more: Any) -> None:
    """The files that sentence-transformers writes beside a model."""
    parts = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{part}" if index else "",
            "type": f"st.models.{part}",
        }
        for index, part in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{mode}": mode == MODES[kind] for mode in MODES.values()}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN, **modes}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(more))
