"""What an entry of the keys file may say, and how mistakes in it are told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from paceline.config.server import ServerConfig
from paceline.core.service_class import CLASSES
from paceline.server.access.caller import Prices
from paceline.server.access.keys_file import BadKeysFile, Keyring, parse_keys, read_keys
from paceline.server.app import Api, Application
from tests.serve_fake import FakeClient

HASH = hashlib.sha256(b"k").hexdigest()
WHOLE = {
    "name": "team-a",
    "sha256": HASH,
    "enabled": True,
    "class": "interactive",
    "weight": 2.5,
    "requests_per_minute": 600,
    "tokens_per_minute": 1_000_000,
    "max_concurrency": 16,
    "lowest_priority_number": -3,
    "adapters": ["poet", "clerk"],
    "prices": {"prompt": 0.5, "cached_prompt": 0.1, "output": 2, "kv_block_second": 1e-4},
}


def parsed(**changes: Any) -> Any:
    (key,) = parse_keys(json.dumps({**WHOLE, **changes}), "keys.jsonl")
    return key


def test_all_an_entry_says_reaches_the_caller() -> None:
    (caller,) = Keyring([parsed()]).callers
    assert (caller.tenant, caller.service_class, caller.weight) == ("team-a", "interactive", 2.5)
    assert (caller.requests_per_minute, caller.tokens_per_minute) == (600, 1_000_000)
    assert (caller.max_concurrency, caller.lowest_priority_number) == (16, -3)
    assert caller.adapters == frozenset({"poet", "clerk"})
    prices = {"prompt": "0.5", "cached_prompt": "0.1", "output": "2", "kv_block_second": "0.0001"}
    assert caller.prices == Prices(**{name: Decimal(price) for name, price in prices.items()})


def test_an_entry_of_two_fields_is_standard_unlimited_and_free() -> None:
    (key,) = parse_keys(json.dumps({"name": "a", "sha256": HASH}), "keys.jsonl")
    caller = key
    assert (key.enabled, caller.service_class, caller.weight, caller.prices) == (
        True,
        "standard",
        1.0,
        Prices(),
    )
    limits = (caller.requests_per_minute, caller.tokens_per_minute, caller.max_concurrency)
    assert (*limits, caller.lowest_priority_number) == (None,) * 4


def test_cached_tokens_cost_what_others_cost_unless_said_otherwise() -> None:
    assert parsed(prices={"prompt": 3}).prices == Prices(prompt=Decimal(3), cached_prompt=Decimal(3))
    assert parsed(prices={"prompt": 3, "cached_prompt": 0}).prices.cached_prompt == 0.0


@pytest.mark.parametrize("name", CLASSES)
def test_there_are_four_classes(name: str) -> None:
    assert parsed(**{"class": name}).service_class == name


@pytest.mark.parametrize(
    "field, value",
    [
        ("enabled", "yes"),
        ("enabled", 1),
        ("class", "gold"),
        ("class", None),
        ("class", ["spot"]),
        ("weight", 0),
        ("weight", -1),
        ("weight", float("nan")),
        ("weight", float("inf")),
        ("weight", "2"),
        ("requests_per_minute", 0),
        ("requests_per_minute", 1.5),
        ("requests_per_minute", True),
        ("tokens_per_minute", -1),
        ("tokens_per_minute", 10**13),
        ("max_concurrency", "4"),
        ("lowest_priority_number", 2**31),
        ("adapters", "poet"),
        ("adapters", [""]),
        ("adapters", [3]),
        ("prices", 5),
        ("prices", {"prompt": -1}),
        ("prices", {"output": "1"}),
        ("prices", {"input": 1}),
        ("sha256", HASH[:-1]),
        ("key", "in plain sight"),
    ],
)
def test_a_mistake_names_file_entry_and_field(field: str, value: Any) -> None:
    good = json.dumps({"name": "first", "sha256": "0" * 64})
    with pytest.raises(BadKeysFile) as failed:
        parse_keys(good + "\n" + json.dumps({**WHOLE, field: value}), "keys.jsonl")
    message = str(failed.value)
    assert message.startswith("keys.jsonl, entry 2 (team-a)") and field in message
    assert HASH[:-1] not in message and "in plain sight" not in message


def test_a_disabled_key_is_rejected_but_keeps_its_share() -> None:
    ring = Keyring([parsed(enabled=False)])
    assert (len(ring), list(ring.callers), ring.weights) == (1, [], {"team-a": 2.5})


def test_a_scheduler_can_be_told_the_shares_whenever_keys_are_read() -> None:
    app = Application(ServerConfig(), FakeClient(), Keyring([parsed()]))
    weights: list[Mapping[str, float]] = []
    app.on_weights = weights.append
    app.become_ready(Api(routes=[], model_name="m"))
    app.replace_keys(Keyring([parsed(weight=4)]))
    assert weights == [{"team-a": 2.5}, {"team-a": 4.0}]


def test_nothing_is_kept_of_keys_that_are_gone() -> None:
    app = Application(ServerConfig(), FakeClient(), Keyring([parsed()]))
    rates = app.main.rules.rates
    assert rates.open(parsed()) is not None
    app.replace_keys(Keyring([parsed(enabled=False)]))
    assert len(rates) == 1, "it may come back"
    app.replace_keys(Keyring([parsed(name="team-b")]))
    assert len(rates) == 0


def test_a_key_of_the_environment_that_the_file_has_too_is_the_file_s(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    entries = {"boss": ("secret", True), "team": ("other", False)}
    lines = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "admin": is_admin}
        for name, (key, is_admin) in entries.items()
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    path.chmod(0o600)
    found = read_keys(str(path), {"PACELINE_ADMIN_KEY": "secret", "PACELINE_API_KEY": "other"})
    assert [caller.tenant for caller in found.callers] == ["boss", "team"]
    with pytest.raises(BadKeysFile, match="same sha256"):
        read_keys(str(path), {"PACELINE_ADMIN_KEY": "other"})
