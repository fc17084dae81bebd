"""`paceline engine` as a process of its own, and certificates for links."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_cli import COMMAND, ENDLESS_CONTEXT, environment
from tests.model_folder import write_model

LOOPBACK = "127.0.0.1:0"


class RemoteEngine:
    """An engine that listens; the same made-up model each time."""

    def __init__(self, folder: Path, *flags: str, **changes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._model = write_model(folder / "model", **{"max_position_embeddings": ENDLESS_CONTEXT, **changes})
        self._folder, self._flags, self._address = folder, flags, ""
        self._errors = (folder / "stderr").open("ab")
        self.process = self._start(LOOPBACK)

    def _start(self, listen: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(*COMMAND, "engine", str(self._model), "--load-format", "dummy", "--listen", listen),
                *("--num-gpu-blocks-override", "16384", *self._flags),
            ],
            env=environment(self._folder),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def start_again(self) -> None:
        """In the same place, as whoever starts engines does."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = self._start(self.address)

    @property
    def address(self) -> str:
        """Known once its model is loaded."""
        if not self._address:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert "listens on" in line, self.log()
            self._address = line.rsplit(" ", 1)[1].strip()
        return self._address

    def log(self) -> str:
        return Path(self._errors.name).read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """As an operator ends it."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


@contextmanager
def remote_engines(folder: Path, count: int, *flags: str) -> Iterator[list[RemoteEngine]]:
    made = [RemoteEngine(folder / f"engine-{number}", *flags) for number in range(count)]
    try:
        yield made
    except BaseException:
        for each in made:
            print(each.log())  # pytest shows it beside what failed
        raise
    finally:
        for each in made:
            each.close()


def certificates(folder: Path, name: str = "127.0.0.1") -> tuple[str, ...]:
    """The flags of a side with a certificate for `name`, signed by the one authority of a folder."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificates can be made")
    folder.mkdir(exist_ok=True)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    ca, ca_key = folder / "ca.pem", folder / "ca.key"

    def make(*words: object) -> None:
        subprocess.run([openssl, *map(str, words)], check=True, capture_output=True)

    if not ca.exists():
        make("req", "-x509", *key, "-keyout", ca_key, "-out", ca, "-subj", "/CN=ca", "-days", 2)
    own, own_key, asked = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.csr"
    if not own.exists():
        make("req", *key, "-keyout", own_key, "-out", asked, "-subj", f"/CN={name}")
        more = folder / f"{name}.ext"
        kind = "IP" if name[0].isdigit() else "DNS"
        more.write_text(f"subjectAltName={kind}:{name}\n")
        signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", 2, "-extfile", more)
        make("x509", "-req", "-in", asked, *signed, "-out", own)
    return ("--tls-cert", str(own), "--tls-key", str(own_key), "--tls-ca", str(ca))
