"""One wheel from the package index, fetched by pip in a process of its own, without its dependencies.

pip brings the user's index, proxy and certificates settings with it. Nothing of the wheel is run: source packages,
which would be, are not accepted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 0.2
TIMEOUT_S = 3600.0


class DownloadFailed(Exception):
    """The package could not be had; the text says why."""


def download_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Download the wheel into `folder`, telling how many bytes have arrived; returns its path."""
    log = folder / "pip.log"
    with log.open("w+b") as output:
        process = subprocess.Popen(
            _command(requirement, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip collects a download in the folder for temporary files: made ours, its growth can be watched.
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            code = _watch(process, folder, on_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise DownloadFailed(f"pip could not fetch {requirement}: {_last_line(log)}")
    return wheels[0]


def _command(requirement: str, folder: Path) -> list[str]:
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--progress-bar=off")
    quiet = ("--disable-pip-version-check", "--quiet")
    return [sys.executable, "-m", "pip", "download", *options, *quiet, "-d", str(folder), requirement]


def _watch(process: subprocess.Popen[bytes], folder: Path, on_bytes: Callable[[int], None]) -> int:
    waited_s = 0.0
    while waited_s < TIMEOUT_S:
        try:
            return process.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            waited_s += LOOK_EVERY_S
            on_bytes(_bytes_so_far(folder))
    raise DownloadFailed(f"pip did not finish within {TIMEOUT_S / 60:.0f} minutes")


def _bytes_so_far(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*.whl"):
        try:
            found = max(found, path.stat().st_size)
        except OSError:  # moved away while we looked
            continue
    return found


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    told = [line for line in lines if line]
    errors = [line for line in told if line.startswith("ERROR:")]
    chosen = (errors or told or ["it said nothing"])[-1]
    return chosen.removeprefix("ERROR:").strip()[:300]
