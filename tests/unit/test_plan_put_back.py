"""Lost shards that are put back at once: the model against the real proxy in virtual time, and against figures."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.testing import run_virtual
from stoker_sim._put_back import PutBackModel, PutBackTally, put_back
from stoker_sim._warm_fleet import NodeCalls, NodeLife, Reclaim
from stoker_warm._code import Code
from stoker_warm._put_back import NAMES_AT_ONCE
from stoker_warm._settings import WarmConfig
from support.warm_origin import MemoryOrigin
from support.warm_platform import Tier, named
from support.warm_strikes import HOUR, Plan, lives_of, plan_of, take

OBJECT_BYTES = 3000
SAMPLE_SECONDS = 5.0
EXCHANGE_SECONDS = 0.0145
"""A platform of tests calls an instance that sleeps in 0.01 s; to say hello takes two round trips."""


@dataclass(slots=True, kw_only=True)
class Real:
    """What a real proxy did under a plan of strikes."""

    places: NDArray[np.int64]
    losses: Counter[int]
    unreadable: float
    put_back: int
    reads: int
    read_bytes: int
    serve_calls: int
    billed_seconds: float


async def really_played(
    plan: Plan, hours: float, config: WarmConfig, objects: list[tuple[str, bytes]], read_seconds: float
) -> Real:
    """Fill a tier, take its instances by the plan, and look every few seconds at what could be read."""
    origin = MemoryOrigin.of(objects)
    origin.seconds = read_seconds
    async with Tier(config, seed=1, origins=[origin]) as tier:
        await tier.put(*objects)
        places = placed_by(tier, objects, config.code)
        taking = asyncio.create_task(take(tier, plan, hours))
        unreadable = []
        while not taking.done():
            await asyncio.wait([taking], timeout=SAMPLE_SECONDS)
            unreadable.append(len(objects) - readable(tier, config.code))
        used = tier.proxy.meter._used.values()
        return Real(
            places=places,
            losses=taking.result(),
            unreadable=float(np.mean(unreadable)) / len(objects),
            put_back=tier.proxy.statistics().put_back,
            reads=len(origin.reads),
            read_bytes=sum(end - start for _, start, end in origin.reads),
            serve_calls=sum(call.task == "serve" for call in tier.platform.calls),
            billed_seconds=sum(each.billed_seconds for each in used),
        )


def placed_by(tier: Tier, objects: list[tuple[str, bytes]], code: Code) -> NDArray[np.int64]:
    rows = {name: row for row, (name, _) in enumerate(objects)}
    places = np.full((len(objects), code.shards), -1)
    for node, shards in tier.believed().items():
        for shard in shards:
            places[rows[shard.object], shard.position] = int(node.removeprefix("warm-"))
    assert places.min() >= 0
    return places


def readable(tier: Tier, code: Code) -> int:
    """Return how many objects have enough shards in instances that live."""
    shards = {shard for instance in tier.platform.all_instances() for shard in instance.shelf.ids()}
    return sum(count >= code.data for count in Counter(shard.object for shard in shards).values())


@pytest.mark.parametrize(
    ("config", "count", "hours", "life_minutes", "read_seconds"),
    [
        (WarmConfig(nodes=60, code=Code(4, 1), put_back=8, keep_warm_seconds=20.0), 200, 1.0, 20, 0.1),
        (WarmConfig(nodes=30, code=Code(4, 1), put_back=8, backup_seconds=300.0), 100, 1.0, 10, 0.1),
        (WarmConfig(nodes=24, code=Code(4, 1), put_back=2), 60, 1.0, 20, 0.5),
    ],
    ids=["no back-up", "back-ups", "two at a time, slowly"],
)
def test_the_model_and_the_real_proxy_agree(
    config: WarmConfig, count: int, hours: float, life_minutes: int, read_seconds: float
) -> None:
    objects = [named(number, OBJECT_BYTES) for number in range(count)]
    plan = plan_of(Reclaim(mean_life_seconds=60 * life_minutes, together=0.1), config.nodes, hours)
    real = run_virtual(really_played(plan, hours, config, objects, read_seconds))
    lives = lives_of(plan, hours, config)
    model = PutBackModel(
        at_once=config.put_back,
        start_seconds=0.33,
        first_byte_seconds=read_seconds,
        connection_bytes_per_second=math.inf,
        node_bytes_per_second=math.inf,
        wake_seconds=EXCHANGE_SECONDS,
        linger_seconds=config.linger_seconds,
    )
    found = put_back(model, config.code, real.places, lives, OBJECT_BYTES, hours * HOUR)

    assert real.losses.total() == pytest.approx(sum(len(life.losses) for life in lives), rel=0.03)
    assert found.shards > 300
    assert real.put_back == pytest.approx(found.shards, rel=0.03)
    assert real.reads == pytest.approx(found.requests, rel=0.06)
    assert real.read_bytes == pytest.approx(found.read_bytes, rel=0.05)
    # Which objects go is drawn by each: the same places to begin with, others later.
    assert real.unreadable == pytest.approx(found.lost_seconds / hours / HOUR / len(objects), rel=0.2)

    calls = sum(life.checks + life.greetings for life in lives) + config.nodes + found.calls
    assert real.serve_calls == pytest.approx(calls, rel=0.1)
    billed = NodeCalls(memory_bytes=1 << 30, exchange_seconds=EXCHANGE_SECONDS, linger_seconds=config.linger_seconds)
    served_seconds = EXCHANGE_SECONDS + config.linger_seconds
    filled = config.nodes * (served_seconds + billed.init_seconds)
    kept_warm = sum(life.warm_calls for life in lives) * 0.01
    refilled = found.calls * served_seconds + found.write_seconds
    expected = sum(billed.billed_seconds(lives, 0.0)) + filled + kept_warm + refilled
    assert real.billed_seconds == pytest.approx(expected, rel=0.1)


CODE = Code(2, 1)
SIZE = 2000
PLACES = np.array([[0, 1, 2], [0, 1, 3], [2, 3, 0]])
LOSS = (10.0, 20.0)
MODEL = PutBackModel(
    at_once=1,
    start_seconds=1.0,
    first_byte_seconds=2.0,
    connection_bytes_per_second=1000.0,
    node_bytes_per_second=1000.0,
    wake_seconds=0.5,
    linger_seconds=10.0,
)


def life(*losses: tuple[float, float]) -> NodeLife:
    return NodeLife(losses=losses, greetings=0, copies=0, checks=0, warm_calls=0.0)


def played(
    *losses: tuple[float, float] | None, model: PutBackModel = MODEL, nodes: int = 4, seconds: float = HOUR
) -> PutBackTally:
    """Play losses of the first nodes, one each or none."""
    lives = [life(loss) if loss else life() for loss in losses]
    return put_back(model, CODE, PLACES, [*lives, *[life()] * (nodes - len(lives))], SIZE, seconds)


def test_a_range_is_read_for_data_if_it_is_less_than_half_and_else_the_whole() -> None:
    wide = Code(4, 2)
    places = np.array([[0, 1, 2, 3, 4, 5]])

    def read(*nodes: int) -> tuple[int, int]:
        lives = [life(LOSS) if node in nodes else life() for node in range(9)]
        found = put_back(MODEL, wide, places, lives, SIZE, HOUR)
        assert found.shards == len(nodes)
        return found.requests, found.read_bytes

    assert read(0) == (1, 500)
    assert read(0, 1) == (1, 2000)
    assert read(5) == (1, 2000)
    assert read(0, 5) == (1, 2000)


def test_objects_wait_for_their_turn_in_the_order_in_which_they_lost_shards() -> None:
    found = played(LOSS)
    assert (found.shards, found.requests, found.read_bytes) == (3, 3, 3 * SIZE)  # one of two is not less than half
    assert found.notice_seconds == 11.0
    # Each is read in 4 s and written in 1 s; the node has just spoken, and waits between.
    assert found.back_seconds == pytest.approx((5 + 10 + 15) / 3)
    assert found.calls == 0
    assert found.write_seconds == pytest.approx(15.0)


def test_as_many_as_are_allowed_are_read_side_by_side_but_a_node_takes_one_shard_after_another() -> None:
    found = played(LOSS, model=replace(MODEL, at_once=3))
    assert found.back_seconds == pytest.approx((5 + 6 + 7) / 3)


def test_a_node_that_went_to_sleep_between_two_shards_is_called_again() -> None:
    found = played(LOSS, model=replace(MODEL, linger_seconds=3.0))
    assert found.calls == 3
    assert found.write_seconds == pytest.approx(3.0)
    assert found.back_seconds == pytest.approx((5.5 + 11.0 + 16.5) / 3)


def test_what_is_missed_while_a_batch_is_put_back_comes_after_it() -> None:
    found = played(LOSS, None, None, (21.0, 22.0))
    # The other node has two shards: of an object whose turn has not come, which gets both; and of one that waits.
    assert found.shards == 5
    assert found.requests == 3
    assert found.outages.tolist() == [[1.0, 21.0, 31.0], [2.0, 21.0, 36.0]]


def test_an_object_is_away_from_the_loss_of_one_too_many_until_enough_are_back() -> None:
    found = played(LOSS, (15.0, 3700.0))
    assert found.outages.tolist() == [[0.0, 15.0, 26.0], [1.0, 15.0, 31.0]]
    assert found.lost_seconds == 27.0
    assert found.lost_objects(2).tolist() == [2, 0]
    until_noticed = played((15.0, 3700.0), (15.0, 3700.0), seconds=2 * HOUR)
    assert until_noticed.lost_objects(2).tolist() == [2, 2]
    until_the_end = played((15.0, 3700.0), (15.0, 3700.0))
    assert until_the_end.lost_objects(1).tolist() == [2]
    assert until_the_end.lost_seconds == 2 * (HOUR - 15)


def test_what_is_back_is_where_it_was_and_is_lost_with_that_node_again() -> None:
    twice = put_back(MODEL, CODE, PLACES, [life(LOSS, (100.0, 110.0)), *[life()] * 3], SIZE, HOUR)
    assert twice.shards == 6
    on_its_way = put_back(MODEL, CODE, PLACES, [life(LOSS, (28.0, 29.0)), *[life()] * 3], SIZE, HOUR)
    assert on_its_way.shards == 4, "one was there, two were on their way"


def test_nothing_is_put_back_where_nothing_is_lost() -> None:
    found = played()
    assert (found.shards, found.calls, len(found.outages)) == (0, 0, 0)
    assert math.isnan(found.notice_seconds)
    assert math.isnan(found.back_seconds)
    assert found.lost_objects(3).tolist() == [0, 0, 0]


def test_more_than_a_batch_is_put_back_all_the_same() -> None:
    count = NAMES_AT_ONCE + 10
    places = np.array([[(row + at) % 7 for at in range(3)] for row in range(7 * count // 3)])
    lost = int((places == 0).sum())
    found = put_back(MODEL, CODE, places, [life(LOSS), *[life()] * 6], SIZE, HOUR)
    assert found.shards == lost > NAMES_AT_ONCE
    assert found.back_seconds == pytest.approx(5 * (lost + 1) / 2, rel=0.01)


@pytest.mark.parametrize(
    "wrong", [{"at_once": 0}, {"linger_seconds": -1.0}, {"start_seconds": math.nan}, {"node_bytes_per_second": 0.0}]
)
def test_figures_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PutBackModel(**{"at_once": 1, **wrong})  # type: ignore[arg-type]
