"""Text against transformers: tokenizers read from the same folder, chat templates of the common families.

The vocabularies are trained here; real ones are used too where PACELINE_TOKENIZERS names a folder of them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paceline.text.chat_template import ChatTemplate
from paceline.text.stream import Detokenizer
from paceline.text.tokenizer import Tokenizer
from tests.pure.text.text_helpers import backend, needs_real_tokenizers, real_tokenizer, real_tokenizers

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- if tools is not none %}\n    {{- tools | tojson(indent=4) }}\n{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim "
    "+ '<|eot_id|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
QWEN = (
    "{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}\n"
    "{%- endif %}\n{%- set ns = namespace(last=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}\n"
    "        {%- set ns.last = index %}\n        {%- break %}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- for message in messages %}\n    {%- set content = message.content if message.content is string else '' %}\n"
    "    {%- if message.role == 'assistant' %}\n        {%- if '</think>' in content %}\n"
    "            {%- set content = content.split('</think>')[-1].lstrip('\n') %}\n        {%- endif %}\n"
    "        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}\n"
    "    {%- elif message.role == 'user' %}\n        {{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\n\n</think>\n\n' }}\n"
    "    {%- endif %}\n{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{- bos_token }}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{% if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n"
    "    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}\n"
    "    {%- set loop_messages = messages[1:] -%}\n"
    "{%- else -%}\n    {%- set first_user_prefix = '' -%}\n    {%- set loop_messages = messages -%}\n{%- endif -%}\n"
    "{%- for message in loop_messages -%}\n    {%- if message['role'] == 'assistant' -%}\n"
    "        {%- set role = 'model' -%}\n    {%- else -%}\n        {%- set role = message['role'] -%}\n"
    "    {%- endif -%}\n"
    "    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}\n"
    "    {{ message['content'] | trim }}\n    {{ '<end_of_turn>\n' }}\n{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n    {{'<start_of_turn>model\n'}}\n{%- endif -%}\n"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA}
MARKERS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
]
CHATS = [
    [{"role": "user", "content": "Hello {{7*7}} the dog"}],
    [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "the quick brown fox 🙂 世界"},
        {"role": "assistant", "content": "<think>hm</think>\n\nan answer <b>x</b> "},
        {"role": "user", "content": "  and <|more|> < [x] >\n\n"},
    ],
]
SAMPLES = ["", " ", "the dog", "  Grüße\n\n\n世界 🙂 12345 ", "a\tb\r\nc", "e\u0301 \u00e9", "x  y   z"]


def write_model(path: Path, kind: str, template: str) -> None:
    """A model folder around a trained vocabulary that has the markers of all templates."""
    changed = Backend.from_str(backend(kind).to_str())
    changed.add_special_tokens(MARKERS)
    begin = changed.get_vocab()["<s>"]
    changed.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)]
    )
    changed.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
    }
    source = TEMPLATES[template]
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": source}))


@cache
def pair(kind: str, template: str) -> tuple[Tokenizer, ChatTemplate, Any]:
    with TemporaryDirectory() as folder:
        write_model(Path(folder), kind, template)
        made = Tokenizer.from_folder(folder)
        oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    return made, ChatTemplate.for_tokenizer(made), oracle


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "four"])
@pytest.mark.parametrize("generation", [True, False])
def test_prompts_and_ids_are_those_of_transformers(
    kind: str, template: str, chat: list[dict[str, str]], generation: bool
) -> None:
    made, ours, oracle = pair(kind, template)
    text = oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
    ids = oracle(text, add_special_tokens=False)["input_ids"]
    prompt = ours.render(chat, add_generation_prompt=generation)
    assert prompt.text == text
    assert made.encode_template(prompt) == ids


def test_switches_and_tools_are_passed_on_alike() -> None:
    _, ours, oracle = pair("byte-level", "qwen")
    text = oracle.apply_chat_template(
        CHATS[0], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert ours.render(CHATS[0], switches={"enable_thinking": False}).text == text
    assert text.endswith("</think>\n\n")
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "<ä>", "parameters": {"type": "object"}},
        }
    ]
    _, ours, oracle = pair("byte-level", "llama3")
    text = oracle.apply_chat_template(CHATS[0], tools=tools, tokenize=False, add_generation_prompt=True)
    assert ours.render(CHATS[0], tools=tools).text == text


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma"])
def test_continuing_a_message_is_alike(template: str) -> None:
    made, ours, oracle = pair("byte-level", template)
    chat = [*CHATS[0], {"role": "assistant", "content": "It is "}]
    text = oracle.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=False, continue_final_message=True
    )
    prompt = ours.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text == text
    assert made.encode_template(prompt) == oracle(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("text", SAMPLES)
def test_plain_text_is_encoded_and_decoded_alike(kind: str, text: str) -> None:
    made, _, oracle = pair(kind, "chatml")
    ids = oracle(text)["input_ids"]
    assert made.encode(text) == ids
    for skip in (True, False):
        assert made.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


@needs_real_tokenizers
@pytest.mark.parametrize("path", real_tokenizers(), ids=lambda path: path.name)
def test_real_tokenizers_are_alike(path: Path) -> None:
    made, oracle = real_tokenizer(path), PreTrainedTokenizerFast.from_pretrained(path)
    for text in SAMPLES:
        ids = oracle(text)["input_ids"]
        assert made.encode(text) == ids
        plain = oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert made.decode(ids) == plain
        detokenizer = Detokenizer(made)
        assert "".join([*(detokenizer.push([index]) for index in ids), detokenizer.flush()]) == plain
    if made.chat_template is None:
        return
    chat = ChatTemplate.for_tokenizer(made)
    for messages in CHATS:
        text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = chat.render(messages)
        assert prompt.text == text
        assert made.encode_template(prompt) == oracle(text, add_special_tokens=False)["input_ids"]
