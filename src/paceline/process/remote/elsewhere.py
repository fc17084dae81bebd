"""Which engines of a server are elsewhere: addresses, and names that are looked up again and again."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import NamedTuple

from paceline.config.links import BY_NAME, Address, LinkConfig, read_address
from paceline.process.remote.tls import make_context

FLAG = "--engines"


class Elsewhere(NamedTuple):
    """What was said of them, checked."""

    links: LinkConfig = LinkConfig()
    context: ssl.SSLContext | None = None
    addresses: tuple[Address, ...] = ()
    names: tuple[Address, ...] = ()  # whose every address is an engine
    digest: str = ""  # of the model's files here

    @classmethod
    def read(cls, text: str | None, links: LinkConfig) -> Elsewhere:
        """Raises ConfigError, or CannotLink."""
        made = cls(links, make_context(links, is_engine=False))
        parts = list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
        names = [part.removeprefix(BY_NAME) for part in parts if part.startswith(BY_NAME)]
        return made._replace(
            addresses=tuple([made.address(part) for part in parts if not part.startswith(BY_NAME)]),
            names=tuple([made.address(name) for name in names]),
        )

    def address(self, text: str) -> Address:
        found = read_address(text, FLAG)
        self.links.check(found, FLAG)
        return found

    def __str__(self) -> str:
        return ", ".join([*map(str, self.addresses), *(f"{BY_NAME}{name}" for name in self.names)])


async def look_up(name: Address) -> list[Address]:
    """What a name stands for now; nothing where that cannot be told."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = dict.fromkeys(str(place[0]) for *_, place in found)
    return [Address(host=host, port=name.port, name=name.host) for host in hosts]
