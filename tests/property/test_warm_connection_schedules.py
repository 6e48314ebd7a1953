"""Random uses of a connection: answers have the right bytes, and no other memory is written to."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from itertools import count

from stoker.errors import ConnectionLostError, DeadlineError, StokerError
from stoker.testing import run_virtual
from stoker_warm._auth import NodeHandshake, ProxyHandshake, WarmSecret
from stoker_warm._frames import Head, Kind
from stoker_warm._peer_connections import NodeConnection, ProxyConnection, ReplyParts
from support.warm_connections import limited
from support.warm_wires import Link, LinkConfig

SCHEDULES = 60
SECRET = WarmSecret(bytes(32))
GUARD = b"\xa5"


def content(number: int, size_bytes: int) -> bytes:
    return random.Random(number).randbytes(size_bytes)


class Life:
    """One connection and a network that is as bad as its seed makes it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.numbers = count(1)
        self.limits = {
            "MAX_OPEN_REQUESTS": rng.choice([1, 3, 64]),
            "MAX_WRITE_BYTES": rng.choice([100, 5000, 1 << 20]),
            "STALL_TIMEOUT_SECONDS": rng.choice([2.0, 60.0]),
        }
        link = LinkConfig(
            latency_seconds=rng.choice([0.0, 0.001, 0.1]),
            bytes_per_second=rng.choice([None, 1e5, 1e7]),
            window_bytes=rng.choice([500, 20_000, 1 << 20]),
            segment_bytes=rng.choice([7, 1000, 64 << 10]),
        )
        self.link = Link(link)
        with limited(self.limits):
            self.proxy = ProxyConnection(ProxyHandshake(SECRET), self.notice)
        self.node = NodeConnection(NodeHandshake(SECRET, "n", {}), self.serve)
        self.notices = 0

    def notice(self, connection: ProxyConnection, kind: Kind, head: Head) -> None:
        assert (kind, head["number"]) == (Kind.HERE, self.notices), "notices come in their order"
        self.notices += 1

    def serve(self, kind: Kind, head: Head, body: bytearray) -> ReplyParts:
        number, size_bytes = head["number"], head["size"]
        if head["notify"]:
            self.node.notify(Kind.HERE, {"number": self.outcomes["notices"]})
            self.outcomes["notices"] += 1
        if kind is Kind.SET:
            self.outcomes["body that was never sent"] += body != content(number, size_bytes)
            return Kind.STORED, {"number": number}, ()
        return Kind.FOUND, {"number": number}, (content(number, size_bytes),)

    async def ask(self) -> None:
        rng, number = self.rng, next(self.numbers)
        size_bytes = rng.choice([0, 1, 1000, 20_000, 100_000])
        head = {"number": number, "size": size_bytes, "notify": int(rng.random() < 0.2)}
        kind, timeout = rng.choice([Kind.GET, Kind.SET]), rng.choice([None, None, 0.05, 1.0])
        into, body = bytearray(GUARD * size_bytes), content(number, size_bytes)
        try:
            reply = await self.proxy.request(
                kind,
                head,
                body=[body] if kind is Kind.SET else [],
                into=memoryview(into) if kind is Kind.GET else None,
                timeout_seconds=timeout,
            )
            assert reply.head == {"number": number}, "the answer to another request"
            assert kind is Kind.SET or into == content(number, size_bytes)
            self.outcomes["answered"] += 1
        except (ConnectionLostError, DeadlineError) as error:
            self.outcomes[type(error).__name__] += 1
        finally:
            into[:] = GUARD * size_bytes  # it is ours again, and must not be written to
            await asyncio.shield(self.unmoved(into))

    async def unmoved(self, into: bytearray) -> None:
        await asyncio.sleep(3.0)
        assert into == GUARD * len(into), "memory was written to after its request had ended"

    def faults(self) -> Iterator[None]:
        rng, link = self.rng, self.link
        while True:
            fault = rng.randrange(12)
            end = rng.choice(link.ends)
            if fault < 3:
                end.freeze()
            elif fault < 7:
                for each in link.ends:
                    each.thaw()
            elif fault == 7 and rng.random() < 0.5:
                end.cut_after(end.sent_bytes + rng.randrange(3000))
            elif fault == 8 and rng.random() < 0.2:
                rng.choice([self.proxy, self.node]).abort()
            elif fault == 9 and rng.random() < 0.1:
                link.cut()
            yield

    async def live(self) -> None:
        rng = self.rng
        self.link.join(self.proxy, self.node)
        asking: list[asyncio.Task[None]] = []
        try:
            for side in (self.proxy, self.node):
                await side.wait_authenticated()
            for _ in self.faults():
                asking += [asyncio.create_task(self.ask()) for _ in range(rng.randrange(4))]
                if asking and rng.random() < 0.5:
                    asking[rng.randrange(len(asking))].cancel()
                await asyncio.sleep(rng.choice([0.0, 0.001, 0.05, 0.5]))
                if len(asking) > 40:
                    break
        finally:
            for end in self.link.ends:
                end.thaw()
            if rng.random() < 0.5:
                await asyncio.wait(asking, timeout=20)
            for side in (self.proxy, self.node):
                await side.close()
        await asyncio.sleep(10)  # for callers that check their memory
        for each in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(each, BaseException) and not isinstance(each, asyncio.CancelledError):
                raise each
            self.outcomes["cancelled"] += each is not None
        assert (len(self.proxy._requests), len(self.proxy._outbox), len(self.node._outbox)) == (0, 0, 0)
        assert not self.outcomes["body that was never sent"]


def test_whatever_happens_memory_is_right_and_nothing_is_left() -> None:
    outcomes: Counter[str] = Counter()
    complaints: list[object] = []
    for seed in range(SCHEDULES):

        async def main(seed: int = seed) -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            life = Life(seed)
            with limited(life.limits):
                await life.live()
            outcomes.update(life.outcomes)

        try:
            run_virtual(main())
        except (AssertionError, StokerError) as error:
            error.add_note(f"seed {seed}")
            raise
        assert complaints == [], f"seed {seed}"
    assert min(outcomes[each] for each in ("answered", "cancelled", "ConnectionLostError", "DeadlineError")) > 100, (
        outcomes
    )
