"""The ledger of a real server: what it says, which keys may read it, and what happens on failures and kills."""

from __future__ import annotations

import csv
import hashlib
import json
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client_server import KEY, MODEL, ClientServer, client_server
from tests.e2e.http_server import Reply
from tests.e2e.ledger_crashes import crash
from tests.e2e.model_cli import run, run_process

KEYS = {"payer": KEY, "saver": "key-of-a-saver", "boss": "key-of-the-boss"}
PRICES = {"prompt": 1, "cached_prompt": 0.5, "output": 10, "kv_block_second": 0.01}
SHORT_CRASHES = 3


def write_keys(folder: Path) -> Path:
    entries: list[dict[str, Any]] = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "prices": PRICES}
        for name, key in KEYS.items()
    ]
    entries[1]["class"] = "batch"
    entries[2] |= {"admin": True}
    path = folder / "priced-keys"
    path.write_text("\n".join(map(json.dumps, entries)))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def ledger(folder: Path) -> Path:
    return folder / "ledger.db"


@pytest.fixture(scope="module")
def server(folder: Path, ledger: Path) -> Iterator[ClientServer]:
    flags = ("--ledger", str(ledger), "--api-keys-file", str(write_keys(folder)))
    with client_server(folder, *flags, "--price-factors", "batch=0.4") as running:
        running.wait_for(200)
        yield running


def complete(server: ClientServer, key: str, **fields: Any) -> Reply:
    return server.complete(key=KEYS[key], ignore_eos=True, **fields)


def usage(*arguments: str, cache: Path, key: str = "") -> subprocess.CompletedProcess[str]:
    return run("usage", *arguments, cache=cache, PACELINE_API_KEY=key)


def test_receipts_add_up_to_what_usage_says(server: ClientServer, ledger: Path, tmp_path: Path) -> None:
    answers = [complete(server, key, n=n).json for key in ("payer", "saver") for n in (1, 2)]
    receipts = [answer["usage"]["paceline"] for answer in answers]
    for told in receipts:
        price = told["price"]
        kv = (told["kv_block_seconds"] - told["recompute_kv_block_seconds"]) * price["class_factor"] * 1e7
        assert told["kv_block_seconds"] > 0 and abs(price["kv_nano_units"] - kv) <= 1
    totals = [told["price"]["total_nano_units"] for told in receipts]
    assert [told["service_class"] for told in receipts] == ["standard"] * 2 + ["batch"] * 2
    assert receipts[2]["price"]["class_factor"] == 0.4

    from_file = usage("--ledger", str(ledger), "--by", "key", "--since", "1h", "--json", cache=tmp_path)
    assert from_file.returncode == 0, from_file.stderr
    rows = {row["key"]: row for row in json.loads(from_file.stdout)["data"]}
    assert rows["payer"]["billed_nano_units"] == sum(totals[:2]) and rows["payer"]["output_tokens"] == 15
    assert rows["saver"]["billed_nano_units"] == sum(totals[2:])

    from_server = usage("--url", server.url, "--by", "key", "--json", cache=tmp_path, key=KEYS["boss"])
    assert json.loads(from_server.stdout)["data"] == list(rows.values())
    table = usage("--ledger", str(ledger), "--by", "class,model", cache=tmp_path).stdout.splitlines()
    assert table[0].split()[:3] == ["class", "model", "requests"] and table[-1].split()[0] == "all"
    lines = list(csv.DictReader(usage("--ledger", str(ledger), "--csv", cache=tmp_path).stdout.splitlines()))
    assert {line["key"]: int(line["billed_nano_units"]) for line in lines} == {
        name: row["billed_nano_units"] for name, row in rows.items()
    }
    assert server.metric("billed_units_total") == pytest.approx(sum(totals) / 1e9)


def test_usage_is_for_admins(server: ClientServer, tmp_path: Path) -> None:
    refused = server.ask("GET", "/v1/admin/usage")
    assert (refused.status, refused.code) == (403, "admin_only")
    for query in ("by=colour", "since=soon", "since=1h&since=2h"):
        refused = server.ask("GET", f"/v1/admin/usage?{query}", key=KEYS["boss"])
        assert (refused.status, refused.json["error"]["param"]) == (400, query.partition("=")[0])
    told = server.ask("GET", "/v1/admin/usage?by=&until=2001-01-01", key=KEYS["boss"])
    assert told.status == 200 and not any(row["requests"] for row in told.json["data"])


def test_mistakes_on_the_command_line(ledger: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((), "--ledger FILE names a ledger"),
        (("--ledger", str(tmp_path / "none")), "there is no ledger"),
        (("--ledger", str(ledger), "--by", "colour"), "by takes key, class, model, day"),
        (("--ledger", str(ledger), "--since", "soon"), "--since must be a time such as 24h"),
        (("--ledger", str(ledger), "--json", "--csv"), "not both"),
    ):
        done = usage(*arguments, cache=tmp_path)
        assert done.returncode != 0 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_second_server_does_not_get_the_ledger(server: ClientServer, ledger: Path, folder: Path) -> None:
    model = (folder / MODEL, "--load-format", "dummy", "--port", "0")
    done = run_process("serve", *model, "--ledger", ledger, cache=folder)
    assert done.returncode == 78 and "is in use by another server" in done.stderr.splitlines()[-1]


def test_a_locked_ledger_rejects_requests_until_it_is_free(server: ClientServer, ledger: Path) -> None:
    with closing(sqlite3.connect(ledger, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused = complete(server, "payer")
        assert (refused.status, refused.code) == (503, "ledger_unavailable")
        refused = complete(server, "payer")  # rejected before it is generated now
        assert refused.status == 503 and "no requests are taken" in refused.json["error"]["message"]
        health = server.ask("GET", "/health")
        assert (health.status, health.json) == (503, {"status": "ledger_unavailable"})
        assert server.metric("ledger_up") == 0
        other.execute("ROLLBACK")
    server.wait_for(200)
    assert complete(server, "payer").status == 200
    with closing(sqlite3.connect(ledger)) as connection:
        reasons = connection.execute(
            "SELECT state, reason, total_nano FROM entries WHERE state != 'complete'"
        )
        assert reasons.fetchall() == [("incomplete", "ledger_unavailable", 0)]


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """The whole fifty: python -m tests.e2e.ledger_crashes --kills 50."""
    cases = crash(tmp_path, SHORT_CRASHES, seed=3)
    assert cases["ended, complete"] > 0 and sum(cases.values()) > cases["ended, complete"], cases
