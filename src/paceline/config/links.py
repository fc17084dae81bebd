"""Links between a server and engines on other machines: addresses, and the certificates of both sides.

A link beyond this machine is encrypted and both sides prove who they are; on loopback and unix sockets it is plain,
unless there are certificates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from paceline.config.options import check_options, option
from paceline.config.server import LOOPBACK
from paceline.errors import ConfigError, PacelineError

BY_NAME = "dns:"
CERTIFICATES = "--tls-cert, --tls-key and --tls-ca"


class CannotLink(PacelineError):
    """An address that cannot be listened on or linked to as it is given."""

    exit_code = 78


class Address(NamedTuple):
    """Where an engine listens."""

    host: str = ""
    port: int = 0
    path: str = ""  # of a unix socket, instead
    name: str = ""  # that its certificate is for, where that is not the host

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"

    @property
    def is_private(self) -> bool:
        """Whether it can be reached from this machine alone."""
        return bool(self.path) or self.host in LOOPBACK or self.host.startswith("127.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """The certificates of links between a server and its engines on other machines."""

    PANEL: ClassVar = "Links between machines"

    tls_cert: str | None = option(
        None, "certificate of this side of links between servers and engines", metavar="FILE"
    )
    tls_key: str | None = option(None, "private key of --tls-cert", metavar="FILE")
    tls_ca: str | None = option(
        None, "certificates that the certificate of the other side must be signed by", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if len({self.tls_cert is None, self.tls_key is None, self.tls_ca is None}) > 1:
            raise ConfigError(f"{CERTIFICATES} go together; give all of them or none")

    def check(self, address: Address, flag: str) -> None:
        """Raises CannotLink for a link beyond this machine without certificates."""
        if self.tls_cert is None and not address.is_private:
            raise CannotLink(
                f"{flag} {address} is a link beyond this machine, which needs certificates of both sides: give "
                f"{CERTIFICATES}, or an address on 127.0.0.1 or a unix socket"
            )


def read_address(text: str, flag: str, *, name: str = "") -> Address:
    """`HOST:PORT`, or the path of a unix socket. Raises ConfigError."""
    if "/" in text:
        return Address(path=text)
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    is_bare_v6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not (colon and host and is_port) or is_bare_v6:
        raise ConfigError(
            f"{flag} {text!r:.100}: an address is HOST:PORT, [HOST]:PORT or the path of a socket"
        )
    return Address(host=host.strip("[]"), port=int(port), name=name)
