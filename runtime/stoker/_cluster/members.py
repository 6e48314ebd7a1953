"""The machines of a job that share their caches, and which of them has the place of an object.

The owner of an object is computed from its name and the members alone, by weighted rendezvous hashing
(C. Schindelhauer, G. Schomaker, "Weighted distributed hash tables", SPAA 2005, logarithmic method): each member draws a
number for the object, and the smallest one wins. So there is no directory, a member that joins takes over only its
share, and that of one that is lost goes to all others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from stoker._cluster.secret import ClusterSecret
from stoker._order.random_words import mix
from stoker._shared.address import Address
from stoker.errors import ConfigError

_OWNERS = 3
_KNOWN_NAMES = 1 << 14
"""Objects whose owners are remembered."""
_LABEL = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The cache process of a machine.

    Attributes:
        label: 16 hexadecimal digits that stay when the process is started again.
        address: where it accepts clients of other machines.
        limit_bytes: size of its memory, in bytes.
    """

    label: str
    address: Address
    limit_bytes: int

    def encode(self) -> dict[str, object]:
        """Return its description, for JSON."""
        return {"label": self.label, "address": str(self.address), "bytes": self.limit_bytes}

    @classmethod
    def decode(cls, fields: Any) -> Self:
        """Return the member with a description.

        Raises:
            ValueError: it makes no sense.
        """
        try:
            label, address, limit_bytes = fields["label"], Address.parse(fields["address"]), fields["bytes"]
        except (TypeError, KeyError, ConfigError) as error:
            raise ValueError(f"{fields!r:.80} does not describe a member: {error}") from None
        is_size = type(limit_bytes) is int and 0 < limit_bytes < 1 << 63
        if not (isinstance(label, str) and _LABEL.fullmatch(label) and is_size and address.port):
            raise ValueError(f"{fields!r:.80} does not describe a member")
        return cls(label=label, address=address, limit_bytes=limit_bytes)


class Registry(Protocol):
    """Where the machines of a job find each other.

    Attributes:
        job: text that is equal for all loaders of the job, and for no other job that may be on the same machines.
        machines: number of machines of the job; 0 if it is not known.
    """

    job: str
    machines: int

    async def secret(self) -> ClusterSecret:
        """Return the secret of the job.

        Raises:
            StokerError: it is not there, or cannot be read.
            OSError: it cannot be read.
        """
        ...

    def addresses(self) -> list[Address]:
        """Return where a process of this machine may listen, the preferred one first; port 0 for any free one.

        Raises:
            OSError: the others cannot be reached from here.
        """
        ...

    async def join(self, member: Member) -> list[Member]:
        """Record this machine's process, unless it is there already, and return all members, the latest last.

        Raises:
            StokerError: that is impossible now.
            OSError: that is impossible now.
            ValueError: the record makes no sense.
        """
        ...


class Members:
    """The members as one process knows them."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._seeds = np.empty(0, np.uint64)
        self._weights = np.empty(0)
        self._known: dict[tuple[str, frozenset[str]], list[Member]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def update(self, members: Iterable[Member]) -> None:
        """Replace the members; of several with the same label, the last one counts."""
        self._members = sorted({each.label: each for each in members}.values(), key=lambda each: each.label)
        self._seeds = mix(np.array([int(each.label, 16) for each in self._members], np.uint64))
        self._weights = np.array([each.limit_bytes for each in self._members], float)
        self._known.clear()

    def owners(self, name: str, lost: frozenset[str] = frozenset()) -> list[Member]:
        """Return the owner of an object, and who would be if it, and the next one, were lost or had not joined yet.

        Args:
            name: name of the object.
            lost: labels of members that are out of reach.

        Returns:
            At most three members, none of them lost.
        """
        found = self._known.get((name, lost))
        if found is None:
            if len(self._known) >= _KNOWN_NAMES:
                self._known.clear()
            found = self._known[name, lost] = self._find_owners(name, lost)
        return found

    def _find_owners(self, name: str, lost: frozenset[str]) -> list[Member]:
        words = mix(self._seeds ^ np.uint64(int(name[16:], 16)))
        draws = -np.log((words >> np.uint64(11)).astype(float) + 0.5) + 53 * math.log(2.0)
        found: list[Member] = []
        for number in np.argsort(draws / self._weights, kind="stable").tolist():
            if self._members[number].label not in lost:
                found.append(self._members[number])
                if len(found) == _OWNERS:
                    break
        return found
