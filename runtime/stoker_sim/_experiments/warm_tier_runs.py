"""A warm tier under random reclaims: what lasts and what it costs, by setting and by mean life.

A node's history is that of :mod:`stoker_sim._models.warm_node`. What is lost if reads put lost shards back follows from
it without drawing objects, since these are on random nodes; if they are put back at once it is played by
:mod:`stoker_sim._models.put_back`. Both are checked against the real proxy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stoker._base.meter import Operation
from stoker._cost.prices import Prices
from stoker_sim._experiments.published import published
from stoker_sim._models.erasure import lost_between_reads, placed
from stoker_sim._models.put_back import PutBackModel, put_back
from stoker_sim._models.reclaim import Reclaim, Strike, strikes
from stoker_sim._models.warm_fleet import Bill, NodeCalls, Served
from stoker_sim._models.warm_node import NodeLife, lived
from stoker_warm._code import Code
from stoker_warm._upkeep import UpkeepConfig

__all__ = [
    "LINGER_SECONDS",
    "OBJECTS",
    "OBJECT_BYTES",
    "PAPER",
    "Found",
    "Lives",
    "Load",
    "Setting",
    "found_of",
    "node_calls",
]

PAPER = published("infinicache")
OBJECT_BYTES = 8 << 20
OBJECTS = 3_950
"""Each is read once an hour, so as many reads as the paper's largest bill is for."""
LINGER_SECONDS = 0.05
_SEED = 1


class Lives(NamedTuple):
    """How long instances live on average, and what part of reclaims takes both of a function."""

    minutes: int
    together: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a tier is run.

    Attributes:
        code: of its objects.
        warm_seconds: a node is called so long after the last contact.
        backup_seconds: its second instance is called so often; None for no second instances.
        put_back: objects at a time whose lost shards are put back from the bucket when a loss is noticed; 0: they are
            put back by the next read.
    """

    code: Code
    warm_seconds: float = 60.0
    backup_seconds: float | None = None
    put_back: int = 0

    def __str__(self) -> str:
        kept: list[str] = []
        if self.backup_seconds is not None:
            kept.append(f"back-up {self.backup_seconds / 60:.0f} min")
        if self.put_back:
            kept.append(f"put back, called every {self.warm_seconds:.0f} s")
        return ", ".join([str(self.code), *(kept or ["no back-up"])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a fleet holds for how long, and how often each object is read."""

    hours: int
    functions: int = PAPER["functions"]
    objects: int = OBJECTS
    read_seconds: float = 3600.0

    @property
    def reads(self) -> float:
        """Of objects."""
        return self.objects * self.hours * 3600.0 / self.read_seconds

    def shards_of_node(self, code: Code) -> float:
        """Return how many shards a node holds."""
        return self.objects * code.shards / self.functions

    def held_bytes(self, code: Code) -> float:
        """Return what a node holds."""
        return self.shards_of_node(code) * code.shard_bytes(OBJECT_BYTES)


class _Eager(NamedTuple):
    """What it took to put shards back at once: mean times, and bytes a second from the bucket."""

    notice_seconds: float
    back_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of it.

    Attributes:
        object_hours: the part of object-hours in which the object could always be restored.
        whole_hours: the part of hours in which every object could.
        bill: for all.
        copied_bytes: that went through the proxy to put shards back and for back-ups.
        eager: what it took to put shards back at once, if that was done.
    """

    object_hours: float
    whole_hours: float
    bill: Bill
    copied_bytes: float
    eager: _Eager | None = None


@lru_cache(maxsize=16)
def _strikes(lives: Lives, functions: int, hours: int) -> list[list[Strike]]:
    """Return what the platform takes: the same for every setting."""
    reclaim, rng = Reclaim(mean_life_seconds=60.0 * lives.minutes, together=lives.together), random.Random(_SEED)  # noqa: S311 - a model's
    return [list(strikes(reclaim, hours * 3600.0, rng)) for _ in range(functions)]


def _histories(setting: Setting, lives: Lives, load: Load) -> list[NodeLife]:
    upkeep = UpkeepConfig(
        warm_seconds=setting.warm_seconds, backup_seconds=setting.backup_seconds, peer_seconds=setting.backup_seconds
    )
    uses_per_second, rng = load.shards_of_node(setting.code) / load.read_seconds, random.Random(_SEED)  # noqa: S311
    return [
        lived(
            upkeep,
            each,
            load.hours * 3600.0,
            offset=(node + 1) / load.functions,
            uses_per_second=uses_per_second,
            rng=rng,
        )
        for node, each in enumerate(_strikes(lives, load.functions, load.hours))
    ]


@lru_cache(maxsize=1024)
def found_of(setting: Setting, lives: Lives, load: Load) -> Found:
    """Return what comes of a tier; the platform takes the same instances at the same times from each."""
    histories = _histories(setting, lives, load)
    return _put_back_at_once(setting, histories, load) if setting.put_back else _read(setting, histories, load)


def _read(setting: Setting, histories: Sequence[NodeLife], load: Load) -> Found:
    """Return what comes of lost shards that the next read of their object puts back, each in a call of its own."""
    lost_seconds = [[at for at, _ in each.losses] for each in histories]
    lost = lost_between_reads(setting.code, lost_seconds, load.hours, load.read_seconds)
    # What a node loses twice between two reads is put back once.
    refills = sum(len({int(at // load.read_seconds) for at in each}) for each in lost_seconds)
    repair = node_calls().moving(refills * load.shards_of_node(setting.code), setting.code.shard_bytes(OBJECT_BYTES))
    copies = sum(2 * each.copies for each in histories) + refills
    return Found(
        object_hours=1.0 - float(lost.mean()),
        whole_hours=float(((1.0 - lost) ** load.objects).mean()),
        bill=_bill(setting, histories, load, repair, gets=float(lost.sum()) * load.objects),
        copied_bytes=copies * load.held_bytes(setting.code),
    )


def _put_back_at_once(setting: Setting, histories: Sequence[NodeLife], load: Load) -> Found:
    """Return what comes of lost shards that are put back from the bucket when a loss is noticed."""
    code, calls = setting.code, node_calls()
    model = PutBackModel(at_once=setting.put_back, linger_seconds=calls.linger_seconds)
    places = placed(code, load.objects, load.functions, np.random.default_rng(_SEED))
    played = put_back(model, code, places, histories, OBJECT_BYTES, load.hours * 3600.0)
    lost = played.lost_objects(load.hours)
    copied_bytes = played.shards * code.shard_bytes(OBJECT_BYTES)
    return Found(
        object_hours=1.0 - float(lost.mean()) / load.objects,
        whole_hours=float((lost == 0).mean()),
        bill=_bill(setting, histories, load, Served(played.calls, played.write_seconds), gets=played.requests),
        copied_bytes=copied_bytes + 2 * sum(each.copies for each in histories) * load.held_bytes(code),
        eager=_Eager(played.notice_seconds, played.back_seconds, played.read_bytes / load.hours / 3600.0),
    )


def node_calls() -> NodeCalls:
    """Return what calls of the paper's functions are billed for."""
    return NodeCalls(memory_bytes=PAPER["memory_bytes"], linger_seconds=LINGER_SECONDS)


def _bill(setting: Setting, histories: Sequence[NodeLife], load: Load, repair: Served, gets: float) -> Bill:
    prices, calls, code = Prices.load(), node_calls(), setting.code
    return calls.bill(
        histories,
        load.held_bytes(code),
        prices.function("lambda"),
        read=calls.moving(load.reads * code.shards, code.shard_bytes(OBJECT_BYTES)),
        repair=repair,
        bucket_dollars=gets * prices.store("s3://any").request_dollars(Operation.GET),
    )
