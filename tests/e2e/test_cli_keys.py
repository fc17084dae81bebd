"""`paceline keys` as an operator runs it, on files that are well, broken, shared and contended."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run
from paceline.server.access.keys_file import read_keys

ROOT = Path(__file__).resolve().parents[2]


class Keys:
    """The commands on one file, in this process."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        assert run(["keys", *arguments, "--file", str(self.path)]) == code
        shown = self._capsys.readouterr()
        self.said = shown.err
        return shown.out if code == 0 else shown.err

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    return Keys(tmp_path / "keys.jsonl", capsys)


def tenant_of(path: Path, key: str) -> str:
    return read_keys(str(path), {}).admit([(b"x-api-key", key.encode())]).tenant


def test_a_new_key_is_printed_once_and_lets_in(keys: Keys) -> None:
    key = keys("add", "team-a").strip()
    assert len(key) > 40 and tenant_of(keys.path, key) == "team-a"
    assert "kill -HUP" in keys.said and key not in keys.said
    text = keys.path.read_text(encoding="utf-8")
    assert key not in text and hashlib.sha256(key.encode()).hexdigest() in text
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert keys("add", "team-b").strip() != key
    assert key not in keys("ls")


def test_what_a_key_may_do_is_written_and_listed(keys: Keys) -> None:
    options = {
        "--class": "spot",
        "--weight": "2.5",
        "--requests-per-minute": "600",
        "--tokens-per-minute": "2m",
        "--max-concurrency": "8",
        "--lowest-priority-number": "-1",
        "--cache-share": "0.25",
        "--adapters": "bard, poet",
        "--price-prompt": "0.5",
        "--price-output": "2",
        "--price-kv-block-second": "0.001",
    }
    made = keys.json("add", "a", *(part for option in options.items() for part in option))
    rights = {
        "class": "spot",
        "weight": 2.5,
        "requests_per_minute": 600,
        "tokens_per_minute": 2_000_000,
        "max_concurrency": 8,
        "lowest_priority_number": -1,
        "cache_share": 0.25,
        "adapters": ["bard", "poet"],
    }
    prices = {"prompt": 0.5, "output": 2.0, "kv_block_second": 0.001}
    assert made == {"name": "a", "key": made["key"], "file": str(keys.path), **rights, "prices": prices}
    (listed,) = keys.json("ls")["keys"]
    assert listed == {
        "name": "a",
        "enabled": True,
        "admin": False,
        **rights,
        "prices": {**prices, "cached_prompt": 0.5},
    }
    head, line = keys("ls").splitlines()
    assert line.split() == ["a", "spot", "2.5", "600", "2,000,000", "8", "-1"]
    assert head.index("tokens/min") == line.index("2,000,000")


def test_a_revoked_key_is_rejected_and_its_name_can_come_back(keys: Keys) -> None:
    old = keys("add", "a").strip()
    assert keys("revoke", "a") == "Revoked a.\n" and "kill -HUP" in keys.said
    with pytest.raises(Exception, match="disabled"):
        tenant_of(keys.path, old)
    assert keys("ls").splitlines()[1].split()[-1] == "revoked"
    assert keys.json("revoke", "a") == {
        "name": "a",
        "file": str(keys.path),
        "enabled": False,
        "changed": False,
    }
    new = keys("add", "a", "--class", "batch").strip()
    assert tenant_of(keys.path, new) == "a"
    with pytest.raises(Exception, match="missing or wrong"):
        tenant_of(keys.path, old)


def test_comments_and_other_entries_stay_as_they_are(keys: Keys) -> None:
    other = '{"name":"b",  "sha256":"' + "0" * 64 + '"}'
    text = f"# the keys of the lab\n\n{other}\n"
    keys.path.write_text(text, encoding="utf-8")
    keys.path.chmod(0o600)
    keys("add", "a")
    keys("revoke", "a")
    assert keys.path.read_text(encoding="utf-8").startswith(text)


@pytest.mark.parametrize(
    "arguments, code, part",
    [
        (("add", "a"), 78, "has a key a already"),
        (("add", "b", "--weight", "0"), 2, "--weight must be at least"),
        (("add", "b", "--class", "gold"), 2, "--class"),
        (("add", "b", "--requests-per-minute", "0"), 2, "--requests-per-minute"),
        (("add", "b", "--price-output", "-1"), 2, "--price-output"),
        (("add", "b", "--price-output", "nan"), 2, "--price-output"),
        (("add", "b c"), 78, "name must be"),
        (("add",), 2, "its name"),
        (("revoke",), 2, "its name"),
        (("revoke", "nobody"), 78, "no key 'nobody'"),
    ],
)
def test_mistakes_change_nothing(keys: Keys, arguments: tuple[str, ...], code: int, part: str) -> None:
    keys("add", "a")
    before = keys.path.read_bytes()
    said = keys(*arguments, code=code)
    assert part in said and said.startswith("paceline: error: ") and said.count("\n") == 1
    assert keys.path.read_bytes() == before
    assert {path.name for path in keys.path.parent.iterdir()} == {"keys.jsonl", "keys.jsonl.lock"}


@pytest.mark.parametrize(
    "text, mode, part",
    [
        ('{"name": "a"}\n', 0o600, "entry 1 (a): sha256"),
        ("{\n", 0o600, "not JSON"),
        ("- name: a\n  sha256: " + "f" * 64, 0o600, "JSON lines"),
        ("", 0o644, "chmod 600"),
    ],
)
def test_a_file_that_is_not_well_is_not_touched(keys: Keys, text: str, mode: int, part: str) -> None:
    keys.path.write_text(text, encoding="utf-8")
    keys.path.chmod(mode)
    assert part in keys("add", "b", code=78)
    assert keys.path.read_text(encoding="utf-8") == text


def test_which_file_is_told_by_the_environment_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PACELINE_API_KEYS_FILE", raising=False)
    assert run(["keys", "ls"]) == 2 and "PACELINE_API_KEYS_FILE" in capsys.readouterr().err
    monkeypatch.setenv("PACELINE_API_KEYS_FILE", str(tmp_path / "k"))
    assert run(["keys", "ls"]) == 78 and "cannot be read" in capsys.readouterr().err
    assert run(["keys", "revoke", "a"]) == 78 and "is not there" in capsys.readouterr().err
    assert not (tmp_path / "k").exists()
    assert run(["keys", "add", "a"]) == 0 and (tmp_path / "k").exists()
    monkeypatch.setenv("PACELINE_API_KEYS_FILE", str(tmp_path / "no" / "folder"))
    assert run(["keys", "add", "a"]) == 78 and "cannot be written" in capsys.readouterr().err


def test_a_link_to_the_file_stays_a_link(keys: Keys, tmp_path: Path) -> None:
    keys("add", "a")
    link = tmp_path / "link"
    link.symlink_to(keys.path)
    assert run(["keys", "add", "b", "--file", str(link)]) == 0
    assert link.is_symlink() and len(read_keys(str(keys.path), {})) == 2


def test_what_a_killed_writer_left_is_harmless(keys: Keys) -> None:
    (keys.path.parent / ".keys.jsonl.new").write_text("half of", encoding="utf-8")
    keys("add", "a")
    assert len(keys.json("ls")["keys"]) == 1


def test_two_writers_lose_nothing(keys: Keys) -> None:
    """Each adds eight keys and revokes half of them, both at once."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom paceline.server.access.keys_file import add_key, revoke_key\n"
        "path, writer = Path(sys.argv[1]), sys.argv[2]\n"
        "for n in range(8):\n"
        "    add_key(path, {'name': f'{writer}{n}', 'sha256': f'{writer}{n}'.encode().hex().rjust(64, '0')})\n"
        "    if n % 2:\n        revoke_key(path, f'{writer}{n}')\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(keys.path), writer],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for writer in "ab"
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    found = {key["name"]: key["enabled"] for key in keys.json("ls")["keys"]}
    assert found == {f"{writer}{n}": n % 2 == 0 for writer in "ab" for n in range(8)}
