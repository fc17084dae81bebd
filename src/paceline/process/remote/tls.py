"""TLS of links: contexts for both sides, and a socket of the engine's side that never waits."""

from __future__ import annotations

import ssl

from paceline.config.links import CannotLink, LinkConfig


def make_context(link: LinkConfig, *, is_engine: bool) -> ssl.SSLContext | None:
    """TLS 1.3, with the certificate of the other side checked; None where no certificates are given."""
    if link.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_engine else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(link.tls_cert, link.tls_key)
        context.load_verify_locations(link.tls_ca)
    except (OSError, ValueError) as error:
        files = f"{link.tls_cert}, {link.tls_key} and {link.tls_ca}"
        raise CannotLink(f"the certificates cannot be used ({files}): {error}") from error
    if is_engine:
        context.num_tickets = 0
    return context


class TLSSocket:
    """What a `Channel` needs of a socket, over TLS whose handshake is done."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)

    def fileno(self) -> int:
        return self._sock.fileno()

    def recv_into(self, buffer: memoryview) -> int:
        """As many records as there are: one that is left in the library would not be seen by poll."""
        count = 0
        while count < len(buffer):
            try:
                got = self._sock.recv_into(buffer[count:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if count:
                    break
                raise BlockingIOError from None
            if not got:  # the end; found again by the next call
                break
            count += got
        return count

    def send(self, data: bytes) -> int:
        try:
            return self._sock.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def close(self) -> None:
        self._sock.close()
