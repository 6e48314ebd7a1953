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
from support.packing import numbered, pack
from support.processes import die
from support.stores import Place, run_with

__all__ = ["MOMENTS", "Death", "Moment", "PackTask", "pack_and_die"]

T = TypeVar("T")

Moment = Literal["before", "during", "after"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """When a packer kills itself.

    Attributes:
        moment: before the operation, a while after it began, or when it is done.
        call: at this operation of the process, counted from 0, or the next that is no listing.
        key: at the first write of a key that starts so, if given, instead.
        delay_seconds: how long the operation has run by then, at ``during``.
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
        """Whether it comes with this operation."""
        return operation == "put" and key.startswith(self.key) if self.key else number >= self.call


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTask:
    """What a process packs.

    Attributes:
        place: where to.
        samples: how many, counted from 0.
        mode: ``create`` or ``append``.
        death: when to die, if at all.
    """

    place: Place
    samples: int
    mode: str
    death: Death | None = None


def pack_and_die(task: PackTask) -> None:
    """Pack, and die on the way if told so."""

    async def work(store: Store) -> None:
        await pack(_KillingStore(store, task.death), numbered(task.samples), mode=task.mode)

    run_with(task.place.open(), work)


class _KillingStore(WatchedStore):
    """Kills the process at the operation that the task names, but never behind the pointer.

    Once the pointer is written only the record lacks, and of an ``append`` killed just behind that nobody could tell
    that it had not ended; so that is the end of what a resumed pack can promise.
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
