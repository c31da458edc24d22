"""One HTTPS request to a peer, at an address that was checked: by name, by network, by size and by time."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from http.client import HTTPException, HTTPSConnection
from threading import Timer
from typing import NamedTuple

from django_dbtaskqueue.conf.peers import Peer
from django_dbtaskqueue.core.exceptions import TaskQueueError

MAX_ANSWER_BYTES = 65_536
NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(TaskQueueError):
    """The name of a peer leads to an address that may not be opened."""


class Answer(NamedTuple):
    """What a peer answered; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def post(peer: Peer, body: bytes, headers: Mapping[str, str]) -> Answer:
    """Send a message and return the answer. No redirect is followed, and no proxy of the environment is used."""
    connection = _CheckedConnection(peer)
    more = {"Content-Type": "application/octet-stream", "Connection": "close"}
    try:
        connection.connect()
        with connection.for_at_most(peer.timeout.total_seconds()):
            connection.request("POST", peer.place[2], body, {**headers, **more})
            with connection.getresponse() as answer:
                found = answer.read(MAX_ANSWER_BYTES + 1)
        if len(found) > MAX_ANSWER_BYTES:
            raise HTTPException(f"The answer has more than {MAX_ANSWER_BYTES:,} bytes.")
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, found)
    finally:
        connection.close()


class _CheckedConnection(HTTPSConnection):
    """A connection to an address that was checked. The name is not looked up again; the certificate must be of it."""

    def __init__(self, peer: Peer) -> None:
        host, port, _ = peer.place
        self.tls = _tls(peer.ca_file)
        super().__init__(host, port, timeout=peer.timeout.total_seconds(), context=self.tls)
        self.address = checked_address(host, port, allow_private=peer.allow_private)

    def connect(self) -> None:
        raw = socket.create_connection((self.address, self.port), self.timeout)
        try:
            self.sock = self.tls.wrap_socket(raw, server_hostname=self.host)
        except BaseException:
            raw.close()
            raise

    @contextmanager
    def for_at_most(self, seconds: float) -> Iterator[None]:
        """Break the connection after a time, because a peer can keep each single read short."""
        timer = Timer(seconds, self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        with suppress(OSError, TypeError):  # TypeError: it is closed already
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


@lru_cache(maxsize=64)
def _tls(ca_file: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


def checked_address(host: str, port: int, *, allow_private: bool) -> str:
    """Look a name up once, and return one of its addresses, or raise ``AddressRefused`` if one of them is forbidden."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for text in found:
        if not _may_open(ipaddress.ip_address(text), allow_private=allow_private):
            raise AddressRefused(
                f"{host} has the address {text}, which is not a public one. Nothing was sent. If the peer is in your "
                'own network, set "allow_private": True for it; link-local addresses are never opened.'
            )
    return found[0]


def _may_open(address: Address, *, allow_private: bool) -> bool:
    inner = _ipv4_inside(address)
    if inner is not None:
        return _may_open(inner, allow_private=allow_private)
    if address.is_loopback:  # ::1 counts as reserved
        return allow_private
    site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    if address.is_multicast or address.is_link_local or site_local or address.is_unspecified or address.is_reserved:
        return False
    return address.is_global or allow_private


def _ipv4_inside(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address leads to, if it does."""
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or [None, None])[1]
