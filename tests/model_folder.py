"""A model folder small enough to load in a moment: a config and a tokenizer of single characters, no weights.

Load it with `load_format="dummy"`, or give it random weights with `write_weights`. Every token of the text is one
printable ASCII character, so that the length of a text is the number of its tokens and any part of an answer can serve
as a stop string.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

CONTROLS = ("<|end|>", "<|start|>", "<s>", "</s>")
END_OF_TURN, EOS = 0, 3
CHARACTERS = ["\n", *map(chr, range(32, 127))]
VOCAB_SIZE = len(CONTROLS) + len(CHARACTERS)
CONTEXT = 256
TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def write_model(folder: Path, *, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """Write the folder; `changes` are fields of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        # Sizes that the native CPU kernels cover.
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 2,
        "eos_token_id": EOS,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    backend_of().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


ENCODER_MARKS = ("[PAD]", "[CLS]", "[SEP]")
ENCODER_CONTEXT = 128


def write_encoder(folder: Path, *, labels: int = 0, **changes: Any) -> Path:
    """The same with an encoder, a classifier where it has labels, whose tokenizer knows pairs."""
    kind = "BertForSequenceClassification" if labels else "BertModel"
    named = {"id2label": {str(label): f"kind {label}" for label in range(labels)}} if labels else {}
    sizes = {"num_attention_heads": 4, "max_position_embeddings": ENCODER_CONTEXT, "hidden_act": "gelu"}
    write_model(folder, template=None, architectures=[kind], **sizes, **named, **changes)
    backend = backend_of(ENCODER_MARKS)
    pad, cls, sep = ENCODER_MARKS
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(mark, ENCODER_MARKS.index(mark)) for mark in (cls, sep)],
    )
    backend.save(str(folder / "tokenizer.json"))
    marks = {"pad_token": pad, "cls_token": cls, "sep_token": sep}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    return folder


def write_weights(folder: Path) -> Path:
    """Put random weights into a folder of `write_model`, so that it loads like any other."""
    from tests.pure.models.made import arrays_for, packed, spec_of

    spec = spec_of(json.loads((folder / "config.json").read_text()))
    (folder / "model.safetensors").write_bytes(packed(arrays_for(spec)))
    return folder


def backend_of(controls: tuple[str, ...] = CONTROLS) -> Any:
    # Byte-level spells a space and a newline as other letters.
    spelled = [{" ": "Ġ", "\n": "Ċ"}.get(character, character) for character in CHARACTERS]
    vocabulary = {token: index for index, token in enumerate((*controls, *spelled))}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(controls))
    return backend
