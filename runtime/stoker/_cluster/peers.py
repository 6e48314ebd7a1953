"""The cache processes of other machines, as one event loop of a loader knows and reaches them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from stoker._base.task_group import end_tasks
from stoker._cluster.connection import Connection
from stoker._cluster.frames import Kind
from stoker._cluster.link import Link
from stoker._cluster.members import Member, Members, Registry
from stoker._cluster.secret import ClusterSecret
from stoker._shared.address import Address
from stoker.errors import ConnectionLostError, StokerError

SETTLE_SECONDS = 1.0
"""Time that a loader waits at its start for the other machines of the job."""
LOST_SECONDS = 10.0
"""Time after which others take over the objects of a machine that cannot be reached."""
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.5, 30.0
"""Time from the first try to reach a machine that could not be reached to the next, which doubles, up to a maximum."""
_OUTDATED_SECONDS = 1.0
"""Minimum time from one look at the members to the next if one of them cannot be reached."""
_REFRESH_SECONDS, _MAX_REFRESH_SECONDS = 0.05, 60.0
"""Time from the first look at the members to the next, which doubles, up to a maximum."""

OpenPeer = Callable[[Address, ClusterSecret], Awaitable[Connection]]
"""Connects to the process of another machine.

Raises:
    ConnectionLostError: it cannot be reached, or does not have the secret.
"""

_log = logging.getLogger("stoker.cluster")


class Peers:
    """The members of a job, and connections to them. Belongs to one event loop.

    Args:
        registry: where members find each other.
        open_peer: connects to one.
        tls: whether the process of this machine accepts others over TLS.
    """

    def __init__(self, registry: Registry, open_peer: OpenPeer, *, tls: bool = True) -> None:
        self._registry, self._open_peer, self._tls = registry, open_peer, tls
        self._members, self._own_label = Members(), ""
        self._links: dict[str, Link] = {}
        self._lost: frozenset[str] = frozenset()
        self._secret: ClusterSecret | None = None
        self._entering: asyncio.Task[None] | None = None
        self._node: Connection | None = None
        self._settled, self._outdated, self._is_outdated = asyncio.Event(), asyncio.Event(), False
        self._settle_timer: asyncio.TimerHandle | None = None
        self._problem = ""

    @property
    def is_settled(self) -> bool:
        """Whether the other machines of the job are known, or were waited for."""
        return self._settled.is_set()

    def enter(self, node: Connection) -> None:
        """Have the process of this machine accept clients of others, and find these; again for each new connection."""
        if self._node is not node:
            if self._entering is not None:
                self._entering.cancel()
            self._node = node
            loop = asyncio.get_running_loop()
            if self._settle_timer is None:
                self._settle_timer = loop.call_later(SETTLE_SECONDS, self._settled.set)
            self._entering = loop.create_task(self._enter(node))

    async def settle(self) -> None:
        """Wait until the other machines of the job are known, for a limited time."""
        await self._settled.wait()

    def owners(self, name: str) -> list[Member]:
        """Return the owner of an object, and the next ones; see :meth:`Members.owners`. Empty if there is one."""
        return self._members.owners(name, self._lost) if len(self._members) > 1 else []

    def is_own(self, member: Member) -> bool:
        """Return whether a member is this machine's process."""
        return member.label == self._own_label

    def present(self, member: Member) -> Connection | None:
        """Return the connection to a member if there is one."""
        link = self._links.get(member.label)
        return None if link is None else link.present

    def connections(self) -> list[Connection]:
        """Return all present connections."""
        return [link.present for link in self._links.values() if link.present is not None]

    async def connection(self, member: Member, within_seconds: float = math.inf) -> Connection | None:
        """Return a connection to a member; None if it is out of reach, or is not reached within a time."""
        link = self._links.get(member.label)
        if link is None:
            link = self._links[member.label] = Link(
                partial(self._open, member.label),
                _warn_of_member,
                retry_seconds=_RETRY_SECONDS,
                max_retry_seconds=_MAX_RETRY_SECONDS,
                lost_seconds=LOST_SECONDS,
                on_change=self._note_lost,
            )
        connection = await link.connection(within_seconds)
        if connection is None:  # its process may have been started again, at another port
            self._is_outdated = True
            self._outdated.set()
        return connection

    async def _open(self, label: str) -> Connection:
        address = next((each.address for each in self._members if each.label == label), None)
        if address is None or self._secret is None:
            raise ConnectionLostError("a machine has left the job")
        return await self._open_peer(address, self._secret)

    def _note_lost(self) -> None:
        self._lost = frozenset(label for label, link in self._links.items() if link.is_lost)

    async def close(self) -> None:
        """End all connections. Idempotent."""
        if self._entering is not None:
            await end_tasks([self._entering])
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    async def _enter(self, node: Connection) -> None:
        """Record this machine's process, and look for others ever less often, until the connection to it has ended."""
        pause_seconds = _REFRESH_SECONDS
        while not node.is_lost:
            try:
                await self._look(node, pause_seconds / 4)
                self._problem = ""
            except (StokerError, OSError, ValueError) as error:
                if str(error) != self._problem:
                    _log.warning("the cache of this machine is not shared with others: %s", error)
                self._problem = str(error)
            await self._pause(pause_seconds)
            pause_seconds = min(2 * pause_seconds, self._max_refresh_seconds())

    def _max_refresh_seconds(self) -> float:
        """Return after which time the members are looked for again, as long as each of them is in reach."""
        is_incomplete = len(self._members) < self._registry.machines
        return _OUTDATED_SECONDS if self._is_outdated or is_incomplete else _MAX_REFRESH_SECONDS

    async def _look(self, node: Connection, max_seconds: float) -> None:
        """Learn who the members are from the process of this machine, or from the registry if that was long ago.

        Of all loaders of a machine, one at a time uses the registry.
        """
        answer = await self._tell(node, Kind.LISTEN, max_seconds=max_seconds)
        is_asked = answer.pop("look", False)
        if is_asked:
            secret = (await self._registry.secret()).reveal()
            if answer.get("secret") != secret:  # also that of a job before
                addresses = [str(each) for each in self._registry.addresses()]
                answer = await self._tell(node, Kind.LISTEN, addresses=addresses, secret=secret, tls=self._tls)
        if "problem" in answer:
            raise StokerError(answer["problem"])
        if not answer:  # another loader finds out
            return
        own, known = Member.decode(answer["own"]), answer["members"]
        if self._secret is None or self._secret.reveal() != answer["secret"]:
            self._secret, self._own_label = ClusterSecret.parse(answer["secret"]), own.label
            for link in self._links.values():
                link.forget_failures()
        if is_asked:
            joined = [each.encode() for each in await self._registry.join(own)]
            known = await self._tell(node, Kind.JOIN, members=joined)
        self._update([Member.decode(each) for each in known])
        self._is_outdated = False

    async def _pause(self, seconds: float) -> None:
        """Wait, but not for long if a member cannot be reached."""
        await asyncio.sleep(min(seconds, _OUTDATED_SECONDS))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds - _OUTDATED_SECONDS):
                await self._outdated.wait()
        self._outdated.clear()

    async def _tell(self, node: Connection, kind: Kind, **fields: object) -> Any:
        text = json.dumps({"job": self._registry.job, **fields}).encode()
        return json.loads(await node.send_and_receive(kind, text))

    def _update(self, members: list[Member]) -> None:
        before = {each.label: each for each in self._members}
        for member in members:
            if before.get(member.label) not in (None, member) and (link := self._links.get(member.label)) is not None:
                link.forget_failures()
        self._members.update(members)
        is_same = set(before.values()) == set(self._members)  # if their number is not known, two looks tell
        if len(self._members) >= (self._registry.machines or 2) and (self._registry.machines or is_same):
            self._settled.set()


def _warn_of_member(problem: str) -> None:
    _log.warning("objects of another machine are read from the bucket: %s", problem)
