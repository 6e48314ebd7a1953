"""Hundreds of random fault schedules of a warm tier: always the right bytes, or word that there are none, in time."""

from __future__ import annotations

import asyncio

import pytest

from stoker.testing import run_virtual
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._shard import ShardMac
from support.many_schedules import play_all
from support.warm_faulty_node import NODE_FAULTS
from support.warm_platform import Tier, named
from support.warm_schedules import FAULTS, play
from support.warm_wires import End

SCHEDULES = 175
"""``make soak`` plays more."""


def test_no_fault_delivers_wrong_bytes_takes_for_ever_or_leaves_anything_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts, wrong = play_all(play, SCHEDULES)
    with capsys.disabled():
        print(f"\n{SCHEDULES} random fault schedules of a warm tier:\n  {dict(counts.most_common())}")
    assert not wrong, f"{len(wrong)} went wrong, the first of them {min(wrong)}:\n{wrong[min(wrong)]}"
    assert {*FAULTS, *(f"node fault: {fault}" for fault in NODE_FAULTS)} <= set(counts)
    assert min(counts[name] for name in ("found", "restored", "rebuilt", "evicted", "corrupt")) > 0


def test_the_same_seed_takes_the_same_course() -> None:
    assert play(77).counts == play(77).counts


def test_without_macs_the_net_catches_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardMac, "verify", lambda mac, shard, payload, said: True)

    def play_many() -> None:
        for seed in range(400):
            play(seed)

    with pytest.raises(BaseExceptionGroup) as caught:
        play_many()
    assert caught.group_contains(AssertionError, match="wrong bytes were delivered")


KEPT, OFFERED = named(1, 90), named(2, 60)
ENDS = ("the node's", "the proxy's")


class Exchange:
    """A sleeping node is called: it connects, is asked for a shard, gets another, and returns."""

    def __init__(self, tier: Tier, end: int) -> None:
        self.tier = tier
        self.instance = tier.platform.instances["warm-0"][0]
        self.end: End = self.instance.ends[0]._link.ends[end]
        self.sent_before = self.end.sent_bytes

    async def play(self) -> None:
        assert await self.tier.can_read(*KEPT), "two of three nodes are well"
        await self.tier.put(OFFERED)
        await asyncio.sleep(1.0)

    async def kill_when_lost(self) -> None:
        while not self.end.is_closing():  # noqa: ASYNC110 - as a platform would, of which nobody is told
            await asyncio.sleep(0.0001)
        self.tier.platform.kill(self.instance)


async def exchange(end: int, cut_at: int | None, *, is_killed: bool = False) -> int:
    """Cut the connection of one node when an end has sent a number of bytes; return how many it sends in total."""
    async with Tier(WarmConfig(nodes=3, code=ErasureCode(2, 1), keep_warm_seconds=20.0)) as tier:
        await tier.put(KEPT)
        await asyncio.sleep(2.0)
        found = Exchange(tier, end)
        if cut_at is not None:
            found.end.cut_after(found.sent_before + cut_at)
        killing = asyncio.ensure_future(found.kill_when_lost() if is_killed else asyncio.sleep(0))
        await found.play()
        sent_bytes = found.end.sent_bytes - found.sent_before
        killing.cancel()
        await asyncio.wait([killing])
        await asyncio.sleep(45.0)  # two calls that keep warm
        assert tier.believed() == tier.held()
        for each in (KEPT, OFFERED):
            assert await tier.can_read(*each)
            assert await tier.can_read(*each)
        assert tier.platform.counts.cold <= 4
    return sent_bytes


@pytest.mark.parametrize("is_killed", [False, True], ids=["cut", "killed"])
@pytest.mark.parametrize("end", [0, 1], ids=ENDS)
def test_a_node_may_be_lost_anywhere_in_an_exchange(end: int, is_killed: bool) -> None:
    """The places are a few bytes apart: every frame has several, in its header and in what follows it."""
    for position in range(0, run_virtual(exchange(end, None)), 5 if is_killed else 3):
        run_virtual(exchange(end, position, is_killed=is_killed))
