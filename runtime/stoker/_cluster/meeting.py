"""Machines that meet at the cache process of one of them, and the addresses at which others reach a machine."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping

from stoker._cluster.frames import Kind
from stoker._cluster.members import Member
from stoker._cluster.secret import SECRET_VARIABLE, ClusterSecret
from stoker._cluster.spec import ClusterSpec
from stoker._cluster.tcp import open_tcp
from stoker._shared.address import Address
from stoker._stores.options import is_loopback
from stoker.errors import ConfigError

_MEETING_VARIABLE, _LISTEN_VARIABLE = "STOKER_CLUSTER", "STOKER_CLUSTER_LISTEN"
_ELSEWHERE = Address("192.0.2.1", 9)
"""An address that no machine has (RFC 5737): the system tells which interface leads to other machines."""


def listen_host(environment: Mapping[str, str]) -> str:
    """Return the address of this machine to listen at; empty for that of the interface that leads to the others.

    Raises:
        ConfigError: it is one that others cannot connect to.
    """
    listen = environment.get(_LISTEN_VARIABLE, "")
    if Address(listen, 0).is_everywhere:
        raise ConfigError(f"{_LISTEN_VARIABLE}={listen}: others cannot connect there; give an address of this machine")
    return listen


def find_meeting(spec: ClusterSpec, environment: Mapping[str, str] = os.environ) -> MeetingAddress | None:
    """Return the address at which machines meet; None if ``STOKER_CLUSTER`` is not set.

    Raises:
        ConfigError: ``STOKER_CLUSTER`` is not ``host:port``, or there is no secret for it.
    """
    if not (meeting := environment.get(_MEETING_VARIABLE, "")):
        return None
    secret = ClusterSecret.parse(environment.get(SECRET_VARIABLE, ""))
    return MeetingAddress(Address.parse(meeting), spec, secret, listen_host(environment))


def own_host(other: Address) -> str:
    """Return the address of this machine towards another one. Sends nothing.

    Raises:
        OSError: the other one is unknown or out of reach.
    """
    family, _, _, _, address = socket.getaddrinfo(other.host, other.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return _reached_host(str(probe.getsockname()[0]), other)


def _reached_host(host: str, named: Address) -> str:
    """Return the host that a name led to, as others reach it: a machine may give its own name one of loopback."""
    return own_host(_ELSEWHERE) if is_loopback(host) and not named.is_local else host


def numeric_address(address: Address) -> Address:
    """Return an address by number, as others reach it.

    Raises:
        OSError: the name is unknown.
    """
    host = str(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0])
    return Address(_reached_host(host, address), address.port)


class MeetingAddress:
    """A :class:`~stoker._cluster.members.Registry` at the cache process of one of the machines, which listens there.

    Args:
        address: its address.
        spec: setting of the loaders.
        secret: the secret.
        listen: address of this machine to listen at, if it is another one; default that of the interface that leads
            to the first.
    """

    machines = 0

    def __init__(self, address: Address, spec: ClusterSpec, secret: ClusterSecret, listen: str = "") -> None:
        if address.is_everywhere or not address.port:
            raise ConfigError(f"{_MEETING_VARIABLE}={address}: others cannot connect there; give an address and a port")
        self._address, self._secret, self._listen, self._tls = address, secret, listen, spec.tls
        self.job = f"meeting {address} {spec.name}"

    async def secret(self) -> ClusterSecret:
        """Return the secret of the job."""
        return self._secret

    def addresses(self) -> list[Address]:
        """Return the meeting address, which only one machine has, and the address towards it, with any free port."""
        return [numeric_address(self._address), numeric_address(Address(self._listen or own_host(self._address), 0))]

    async def join(self, member: Member) -> list[Member]:
        """Record this machine's process, and return all members."""
        connection = await open_tcp(self._address, self._secret, tls=self._tls)
        try:
            text = json.dumps({"job": self.job, "members": [member.encode()]}).encode()
            known = json.loads(await connection.send_and_receive(Kind.JOIN, text))
            if not isinstance(known, list):
                raise ValueError(f"{known!r:.80} does not describe the members")
            return [Member.decode(each) for each in known]
        finally:
            await connection.close()
