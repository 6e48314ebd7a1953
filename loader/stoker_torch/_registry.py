"""Where the machines of a training find each other: the store of torch.distributed, or one of them.

No collective operation is used, since a loader may be made on one rank alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from stoker._base.threads import compute_in_thread
from stoker._cluster.meeting import find_meeting, listen_host, numeric_address, own_host
from stoker._cluster.members import Member, Registry
from stoker._cluster.secret import SECRET_VARIABLE, ClusterSecret
from stoker._cluster.spec import ClusterSpec
from stoker._shared.address import Address
from stoker.errors import ConnectionLostError

_STORE_SECONDS = 10.0

T = TypeVar("T")


def find_registry(spec: ClusterSpec, environment: Mapping[str, str] = os.environ) -> Registry | None:
    """Return where the machines of this training find each other; None if it has one machine.

    Raises:
        ConfigError: ``STOKER_CLUSTER`` is not ``host:port``, or there is no secret for it.
    """
    if (meeting := find_meeting(spec, environment)) is not None:
        return meeting
    listen = listen_host(environment)
    ranks, local_ranks = (_number(environment, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    host, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT")
    if not host or not port or ranks < 2 or ranks == local_ranks or not distributed.is_available():
        return None
    machines = _number(environment, "GROUP_WORLD_SIZE") or (-(-ranks // local_ranks) if local_ranks else 0)
    secret = environment.get(SECRET_VARIABLE, "")
    given = ClusterSecret.parse(secret) if secret else None
    return TorchStore(Address(host, port), spec.key, machines, given, listen)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


class TorchStore:
    """A :class:`~stoker._cluster.members.Registry` in the store of torch.distributed.

    That is the store of the default process group, or where this process has none, as worker processes, the one at
    ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        address: address of the store.
        key: name of the members' keys in it.
        machines: number of machines; 0 if it is not known.
        secret: the secret; default None: one that the first member draws, which all that reach the store can read.
        listen: address of this machine to listen at; default that of the interface that leads to the store.
    """

    def __init__(
        self, address: Address, key: str, machines: int, secret: ClusterSecret | None = None, listen: str = ""
    ) -> None:
        self._address, self._prefix, self.machines, self._secret = address, f"stoker/cluster/{key}", machines, secret
        self.job, self._listen = f"torch {address}", listen

    async def secret(self) -> ClusterSecret:
        """Return the secret of the job."""
        key, drawn = f"{self._prefix}/secret", ClusterSecret.generate().reveal()
        if self._secret is None:
            found = await self._ask(lambda store: store.compare_set(key, "", drawn))
            self._secret = ClusterSecret.parse(found.decode())
        return self._secret

    def addresses(self) -> list[Address]:
        """Return the address towards the store's machine, with any free port."""
        return [numeric_address(Address(self._listen or own_host(self._address), 0))]

    async def join(self, member: Member) -> list[Member]:
        """Record this machine's process, unless it is there already, and return all members, the latest last."""
        key = f"{self._prefix}/members"

        def read(store: Any) -> list[Member]:
            keys = [f"{key}/{number}" for number in range(1, store.add(key, 0) + 1)]
            return [Member.decode(json.loads(store.get(each))) for each in keys if store.check([each])]

        def work(store: Any) -> list[Member]:
            members = read(store)
            if {each.label: each for each in members}.get(member.label) != member:
                store.set(f"{key}/{store.add(key, 1)}", json.dumps(member.encode()))
                members = read(store)
            return members

        return await self._ask(work)

    # Values that all machines see: stoker._cluster.shared_reads.SharedValues.

    def is_there(self) -> bool:
        """Return whether the store exists for sure: a process group uses it, or the launcher's agent has it."""
        return _default_store() is not None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    async def get(self, key: str) -> bytes:
        """Return a value; empty if there is none."""
        name = f"{self._prefix}/values/{key}"
        return await self._ask(lambda store: bytes(store.get(name)) if store.check([name]) else b"")

    async def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        await self._ask(lambda store: store.set(f"{self._prefix}/values/{key}", value))

    async def replace(self, key: str, before: bytes, value: bytes) -> bool:
        """Set a value, a text, if it was ``before``, empty for none; return whether it was.

        Raises:
            ConnectionLostError: the store cannot be reached, or ``before`` is no text.
        """
        try:
            name, texts = f"{self._prefix}/values/{key}", (before.decode(), value.decode())
        except UnicodeDecodeError:
            raise ConnectionLostError(f"torch's store at {self._address} has bytes that are no text") from None
        return bytes(await self._ask(lambda store: store.compare_set(name, *texts))) == value

    # What both need.

    async def _ask(self, work: Callable[[Any], T]) -> T:
        """Use the store in a thread, since another operation may block it."""

        def ask() -> T:
            try:
                return work(_default_store() or _own_store(self._address))
            except (OSError, RuntimeError) as error:
                text = str(error).split("\n")[0]
                raise ConnectionLostError(f"torch's store at {self._address} cannot be reached: {text}") from None

        return await compute_in_thread(ask)


_PROCESS = os.getpid()
_own_stores: dict[tuple[int, Address], Any] = {}


def _default_store() -> Any:
    """Return the store of the default process group; None if there is none, or it is that of a parent process."""
    if os.getpid() != _PROCESS or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - no version from 2.4 on has a public way
    while isinstance(store, distributed.PrefixStore):  # type: ignore[attr-defined]  # its stubs lack it
        store = store.underlying_store  # keys are those of a connection of its own
    return store


def _own_store(address: Address) -> Any:
    """Return a connection to a store, which stays open: a store that many connect to at a time may answer late.

    Raises:
        RuntimeError: it cannot be reached.
    """
    key = os.getpid(), address
    if key not in _own_stores:
        limit = timedelta(seconds=_STORE_SECONDS)
        _own_stores[key] = distributed.TCPStore(  # type: ignore[attr-defined]  # its stubs lack it
            address.host, address.port, is_master=False, timeout=limit, wait_for_workers=False
        )
    return _own_stores[key]
