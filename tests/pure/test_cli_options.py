"""Flags as people write them, and the page that lists them."""

import pytest

from paceline.cli import steer
from paceline.cli.command import dashed, whole_number
from paceline.scheduler.policy import POLICY_OPTIONS
from tools import option_pages


@pytest.mark.parametrize(
    "text, value",
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5m", 1_500_000),
        ("2G", 2**31),
        ("1_000", 1000),
        ("-1", -1),
    ],
)
def test_whole_numbers_may_have_a_unit(text: str, value: int) -> None:
    assert whole_number(text) == value


@pytest.mark.parametrize("text", ["", "k", "4kk", "4.0001k", "1e3", "0x10", "4 k", "4t", "²"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        whole_number(text)


def test_underscores_in_the_names_of_flags_are_dashes() -> None:
    given = ["serve", "--max_num_seqs=8", "--config", "my_file.yaml", "--x_y=a_b", "-q", "a_b", "--", "--k_l"]
    assert dashed(given) == [
        *("serve", "--max-num-seqs=8", "--config", "my_file.yaml", "--x-y=a_b", "-q", "a_b", "--", "--k_l"),
    ]


def test_the_page_of_options_is_what_the_commands_declare() -> None:
    assert option_pages.PAGE.read_text(encoding="utf-8") == option_pages.page(), (
        "make options writes it again"
    )


def test_the_table_of_policies_is_what_their_classes_declare() -> None:
    assert option_pages.POLICY_PAGE.read_text(encoding="utf-8") == option_pages.policy_page(), (
        "make options writes it again"
    )


def test_paceline_policy_changes_the_options_that_policies_declare() -> None:
    assert set(steer.POLICY_OPTIONS) == POLICY_OPTIONS
