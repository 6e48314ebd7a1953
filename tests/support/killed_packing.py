"""Packing in a process that kills itself at a given operation on its store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar, get_args

from stoker import Operation
from stoker._format.manifest import POINTER_KEY
from stoker.abc import Store
from stoker.testing import WatchedStore
from support.packing import numbered_samples, pack
from support.processes import die
from support.stores import Place, run_check

__all__ = ["MOMENTS", "Death", "Moment", "PackTask", "pack_and_die"]

T = TypeVar("T")

Moment = Literal["before", "during", "after"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The moment at which a packer kills itself.

    Attributes:
        moment: before the operation, a while after its begin, or at its end.
        call: number of the operation in the process, from 0; if it is a listing, the next other one is used.
        key: prefix of a key whose first write is used instead of ``call``; default none.
        delay_seconds: time since the operation's begin, in seconds, for ``during``.
    """

    moment: Moment
    call: int = -1
    key: str = ""
    delay_seconds: float = 0.0

    @classmethod
    def drawn(cls, random: Random, calls: int) -> Death:
        """Return a death at one of the first ``calls`` operations."""
        moment, call = random.choice(MOMENTS), random.randrange(calls)
        return cls(moment=moment, call=call, delay_seconds=random.random() * 0.003)

    def is_at(self, number: int, operation: str, key: str) -> bool:
        """Return whether this operation is the one."""
        return operation == "put" and key.startswith(self.key) if self.key else number >= self.call


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTask:
    """The work of a packing process.

    Attributes:
        place: place of the data set.
        samples: number of samples, which are numbered from 0.
        mode: ``create`` or ``append``.
        death: moment of the kill; None for none.
        shuffle: seed of a permutation of the samples; None for none.
    """

    place: Place
    samples: int
    mode: str
    death: Death | None = None
    shuffle: int | None = None


def pack_and_die(task: PackTask) -> None:
    """Pack, and die at the task's moment."""

    async def work(store: Store) -> None:
        samples = numbered_samples(task.samples)
        await pack(_KillingStore(store, task.death), samples, mode=task.mode, shuffle=task.shuffle)

    run_check(task.place.open(), work)


class _KillingStore(WatchedStore):
    """Kills the process at the task's operation, but never after the pointer is written.

    After that, only the record is missing, and an ``append`` that is killed then cannot be told from a complete one:
    a resumed pack guarantees nothing further.
    """

    def __init__(self, store: Store, death: Death | None) -> None:
        super().__init__(store)
        self._death = death

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        number, death = len(self.calls), self._death
        self.calls.append(f"{operation.lower()} {key}")
        if death is None or not death.is_at(number, operation.lower(), key):
            result = await request()
        else:
            result = await self._last(death, request)
        if operation is Operation.PUT and key == POINTER_KEY:
            self._death = None
        return result

    async def _last(self, death: Death, work: Callable[[], Awaitable[T]]) -> T:
        if death.moment == "before":
            die()
        doing = asyncio.ensure_future(work())
        if death.moment == "during":
            await asyncio.sleep(death.delay_seconds)
        else:
            await doing
        die()
