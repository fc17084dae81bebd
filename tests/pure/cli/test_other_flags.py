"""Flags of other servers are refused with what to do instead."""

from __future__ import annotations

import re

import pytest

from paceline.cli.serve.flags import INSTEAD, SERVE
from paceline.errors import InputError


@pytest.mark.parametrize("words", [["--api-server-count", "2"], ["--api-server-count=2"]])
def test_a_flag_of_another_server_is_refused_with_advice(words: list[str]) -> None:
    with pytest.raises(InputError, match="--api-server-count; one process takes"):
        SERVE.call(words, "paceline serve")


def test_the_advice_is_for_flags_that_are_not_here_and_names_flags_that_are() -> None:
    assert set(INSTEAD) & set(SERVE.flags) == set()
    named = {flag for advice in INSTEAD.values() for flag in re.findall(r"--[a-z-]+", advice)}
    assert named and named <= set(SERVE.flags)


@pytest.mark.parametrize("flag", ["--run-log", "--decision-log", "--kv-disk-dir"])
def test_what_one_engine_writes_is_refused_for_several(flag: str) -> None:
    with pytest.raises(InputError, match=f"cannot write to one {flag}: leave out {flag} or --replicas$"):
        SERVE.call([flag, "x", "--replicas", "2"], "paceline serve")
