from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.testing import run_virtual
from stoker_local.functions import LocalQueue, QueueSpec
from stoker_local.functions._triggers import LocalMessage


def queue(*, dead_letters: LocalQueue | None = None, **changes: Any) -> LocalQueue:
    spec = QueueSpec(**{"name": "q", "visibility_seconds": 30.0, **changes})
    return LocalQueue(spec, chance=random.Random(7), dead_letters=dead_letters, clock=lambda: 1000.0)


def test_messages_come_in_order_and_are_gone_once_deleted() -> None:
    async def scenario() -> None:
        q = queue()
        ids = [q.send(body) for body in "abc"]
        first = await q.receive(2)
        assert [delivery.body for delivery in first] == ["a", "b"]
        assert [delivery.message_id for delivery in first] == ids[:2]
        assert (first[0].receive_count, first[0].sent_at, first[0].first_received_at) == (1, 1000.0, 1000.0)
        assert (q.bodies, len(q)) == (["c"], 3)
        for delivery in first:
            q.delete(delivery.receipt)
        await asyncio.sleep(100)
        assert (q.bodies, len(q)) == (["c"], 1)

    run_virtual(scenario())


def test_a_message_that_is_not_deleted_comes_back_when_its_visibility_ends() -> None:
    async def scenario() -> None:
        q, loop = queue(), asyncio.get_running_loop()
        q.send("a")
        (first,) = await q.receive(1)
        (second,) = await q.receive(1)
        assert loop.time() == pytest.approx(30.0)
        assert (second.message_id, second.receive_count) == (first.message_id, 2)
        assert second.receipt != first.receipt
        q.delete(first.receipt)  # too late: it belongs to its new receiver
        assert len(q) == 1
        q.delete(second.receipt)
        await q.wait_until_empty()

    run_virtual(scenario())


def test_a_message_received_too_often_becomes_a_dead_letter() -> None:
    async def scenario() -> None:
        dead = queue(name="dead")
        q = queue(max_receives=2, dead_letters=dead)
        message_id = q.send("bad")
        for receives in (1, 2):
            (delivery,) = await q.receive(1)
            assert delivery.receive_count == receives
        await asyncio.sleep(31)
        assert (q.bodies, dead.bodies) == (["bad"], [])
        q.send("good")
        (delivery,) = await q.receive(1)
        assert (delivery.body, q.bodies) == ("good", [])
        (letter,) = await dead.receive(1)
        assert (letter.message_id, letter.body, letter.receive_count) == (message_id, "bad", 1)
        q.close()
        dead.close()

    run_virtual(scenario())


def test_a_batch_waits_for_its_window_but_not_once_it_is_full() -> None:
    async def scenario() -> None:
        q, loop = queue(), asyncio.get_running_loop()
        waiting = asyncio.create_task(q.receive(2, window_seconds=5.0))
        await asyncio.sleep(1)
        q.send("a")
        await asyncio.sleep(2)
        q.send("b")
        assert [delivery.body for delivery in await waiting] == ["a", "b"]
        assert loop.time() == pytest.approx(3.0)
        q.send("c")
        assert [delivery.body for delivery in await q.receive(2, window_seconds=5.0)] == ["c"]
        assert loop.time() == pytest.approx(8.0)
        q.close()

    run_virtual(scenario())


def test_a_batch_ends_before_it_is_too_large() -> None:
    async def scenario() -> None:
        q = queue()
        for body in ("a" * 60, "b" * 30, "c" * 20):
            q.send(body)
        assert [delivery.body[0] for delivery in await q.receive(10, limit_bytes=100, window_seconds=1.0)] == ["a", "b"]
        assert [delivery.body[0] for delivery in await q.receive(10, limit_bytes=10)] == ["c"]
        q.close()

    run_virtual(scenario())


def test_what_comes_in_the_window_and_does_not_fit_is_left_and_ends_the_wait() -> None:
    async def scenario() -> None:
        q, loop = queue(), asyncio.get_running_loop()
        waiting = asyncio.create_task(q.receive(10, limit_bytes=100, window_seconds=9.0))
        for body in ("a" * 60, "b" * 30, "c" * 20):
            await asyncio.sleep(1)
            q.send(body)
        assert [delivery.body[0] for delivery in await waiting] == ["a", "b"]
        assert loop.time() == pytest.approx(3.0)
        assert [delivery.body[0] for delivery in await q.receive(10)] == ["c"]
        q.close()

    run_virtual(scenario())


def test_duplicates_come_again_although_they_are_deleted_as_the_seed_says() -> None:
    async def received() -> list[str]:
        q = queue(duplicate_probability=0.5)
        for number in range(20):
            q.send(str(number))
        bodies = []
        while len(q):
            for delivery in await q.receive(10):
                bodies.append(delivery.body)
                q.delete(delivery.receipt)
        return bodies

    first = run_virtual(received())
    assert set(first) == set(map(str, range(20)))
    assert len(first) > 25
    assert run_virtual(received()) == first


def test_waiting_receivers_get_one_message_each() -> None:
    async def scenario() -> None:
        q = queue()
        receivers = [asyncio.create_task(q.receive(1)) for _ in range(3)]
        await asyncio.sleep(1)
        for body in "abc":
            q.send(body)
        received = [batch[0].body for batch in await asyncio.gather(*receivers)]
        assert sorted(received) == ["a", "b", "c"]
        q.close()

    run_virtual(scenario())


@pytest.mark.parametrize("body", ["", "é" * (1 << 19) + "x"])
def test_a_message_of_a_wrong_size_is_refused(body: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="it takes 1 to 1048576"):
            queue().send(body)

    run_virtual(scenario())


@given(
    steps=st.lists(st.sampled_from(["send", "receive", "delete", "wait"]), max_size=60),
    max_receives=st.integers(1, 3),
    duplicates=st.sampled_from([0.0, 0.5]),
)
def test_no_message_is_ever_lost(steps: list[str], max_receives: int, duplicates: float) -> None:
    async def scenario() -> None:
        dead = queue(name="dead")
        q = queue(max_receives=max_receives, dead_letters=dead, duplicate_probability=duplicates)
        sent: dict[str, str] = {}
        deleted: set[str] = set()
        held: list[LocalMessage] = []
        for step in steps:
            if step == "send":
                body = str(len(sent))
                sent[q.send(body)] = body
            elif step == "receive" and q.bodies:
                taken = asyncio.create_task(q.receive(2))
                await asyncio.sleep(0)  # all that is visible may have become dead letters
                taken.cancel()
                held += [] if taken.cancelled() or not taken.done() else taken.result()
            elif step == "delete" and held:
                delivery = held.pop()
                q.delete(delivery.receipt)
                deleted.add(delivery.message_id)
            elif step == "wait":
                await asyncio.sleep(20)
        await asyncio.sleep(60)  # everything is visible again
        kept = {*q.bodies, *dead.bodies}
        assert {message_id for message_id, body in sent.items() if body not in kept} <= deleted
        assert all(delivery.receive_count <= max_receives for delivery in held)
        q.close()
        dead.close()

    run_virtual(scenario())
