"""Reasoning apart from content: the same under every cut, and never a character in the wrong part."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.text.reasoning import REASONING, ReasoningFormat, ReasoningSplitter, named_reasoning
from tests.pure.text.test_text_tools import cuts

THINK, MISTRAL, GRANITE = REASONING


def split(row: ReasoningFormat, pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    one = ReasoningSplitter(row, is_open=is_open)
    parts = [one.push(piece) for piece in pieces] + [one.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


CASES = [
    (THINK, False, "<think>\nHm, 1 < 2.\n</think>\n\nTwo.", "Hm, 1 < 2.", "Two."),
    (THINK, True, "\nHm.\n\nAh.</think>Two.\n", "Hm.\n\nAh.", "Two.\n"),
    (THINK, True, "no end </thin", "no end </thin", ""),
    (THINK, True, "  ", "", ""),
    (THINK, True, "</think>\n \n", "", ""),
    (THINK, True, "a</think> <think>b</think>", "a", "<think>b</think>"),
    (THINK, True, "a </think </think> b", "a </think", "b"),
    (THINK, False, " <think>a</think>b", "a", "b"),
    (THINK, False, "\n Two <think> three", "", "\n Two <think> three"),
    (THINK, False, "<thi", "", "<thi"),
    (THINK, False, "\n</think>\n\nTwo.", "", "Two."),
    (THINK, False, "</thi</think>", "", "</thi</think>"),
    (THINK, False, "", "", ""),
    (MISTRAL, False, "[THINK]x[y][/THINK]z", "x[y]", "z"),
    (GRANITE, False, "Here is my thought process: a Here b Here is my response: c", "a Here b", "c"),
]


@pytest.mark.parametrize(("row", "is_open", "text", "reasoning", "content"), CASES, ids=range(len(CASES)))
def test_both_parts_under_every_cut(
    row: ReasoningFormat, is_open: bool, text: str, reasoning: str, content: str
) -> None:
    for pieces in [[text], *cuts(text, row.name)]:
        assert split(row, pieces, is_open=is_open) == (reasoning, content), pieces


def test_content_is_passed_on_as_it_comes() -> None:
    one = ReasoningSplitter(THINK, is_open=True)
    assert one.push("a</think>").reasoning == "a"
    assert one.push("b ").content == "b " and one.push("\n").content == "\n"
    assert not one.is_reasoning


@pytest.mark.parametrize(
    ("row", "prompt", "is_open", "expects"),
    [
        (THINK, "<|im_start|>assistant\n<think>\n", True, True),
        (THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        (THINK, "<|im_start|>assistant\n", False, True),
        (MISTRAL, "[INST]hi[/INST]", False, False),
        (MISTRAL, "write [THINK]thoughts[/THINK] first[INST]hi[/INST]", False, True),
        (GRANITE, "Write 'Here is my thought process:' first. <|assistant|>", False, True),
    ],
)
def test_whether_a_prompt_asks_for_reasoning(
    row: ReasoningFormat, prompt: str, is_open: bool, expects: bool
) -> None:
    assert (row.is_open(prompt), row.expects(prompt)) == (is_open, expects)


def test_the_template_tells_or_an_operator_chooses() -> None:
    assert named_reasoning("auto", "{{ content.split('</think>')[-1] }}") is THINK
    assert named_reasoning("auto", "{{ '[/THINK]' }}") is MISTRAL
    assert named_reasoning("auto", "{{ messages }}") is None
    assert named_reasoning("qwen3", "") is THINK and named_reasoning("none", "</think>") is None
    with pytest.raises(
        ConfigError, match=r"--reasoning-parser: there is no 'x'; there are auto, none, deepseek_r1"
    ):
        named_reasoning("x", "")
