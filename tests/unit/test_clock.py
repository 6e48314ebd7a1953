from __future__ import annotations

import asyncio
import socket

import pytest

from stoker.testing import VirtualClockError, VirtualClockLoop, run_virtual


def test_years_pass_at_once_and_timers_fire_in_order() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        fired: list[float] = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append(loop.time())

        async with asyncio.TaskGroup() as group:
            for seconds in (3e8, 0.001, 5.0, 86_400.0 * 3):
                group.create_task(sleeper(seconds))
        return fired

    assert run_virtual(main()) == pytest.approx([0.001, 5.0, 86_400.0 * 3, 3e8])


def test_time_stands_still_while_there_is_work() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.0


def test_a_deadlock_is_an_error_that_names_the_tasks_and_not_a_hang() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait(), name="hopeless")
            await asyncio.sleep(7)

    with pytest.raises(VirtualClockError, match=r"deadlock at 7\.0.*hopeless"):
        run_virtual(main())


def test_tasks_left_behind_are_an_error() -> None:
    left = []

    async def main() -> None:
        left.append(asyncio.create_task(asyncio.sleep(5), name="orphan"))

    with pytest.raises(VirtualClockError, match="1 tasks were left running: orphan"):
        run_virtual(main())
    assert left[0].cancelled()


def test_errors_of_the_coroutine_come_through_unchanged() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main())


def test_timeouts_work_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(1e9)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 30.0


def test_a_jump_makes_every_timer_that_it_passes_late_and_keeps_their_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        fired: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((name, loop.time()))

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("second", 9.0), ("first", 8.0), ("behind", 200.0)):
                group.create_task(sleeper(name, seconds))
            await asyncio.sleep(5.0)
            loop.jump(100.0)
        return fired

    assert run_virtual(main()) == [("first", 105.0), ("second", 105.0), ("behind", 200.0)]


def test_sockets_are_refused() -> None:
    async def main() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            await asyncio.get_running_loop().sock_accept(listener)

    with pytest.raises(VirtualClockError, match="socket"):
        run_virtual(main())


def test_thread_pool_work_runs_inline_with_its_result_or_error() -> None:
    def fail() -> None:
        raise LookupError("inside")

    async def main() -> int:
        with pytest.raises(LookupError, match="inside"):
            await asyncio.to_thread(fail)
        return await asyncio.to_thread(lambda: 42)

    assert run_virtual(main()) == 42


def test_two_loops_have_two_clocks() -> None:
    first, second = VirtualClockLoop(), VirtualClockLoop()
    first.run_until_complete(asyncio.sleep(10))
    assert (first.time(), second.time()) == (10.0, 0.0)
    first.close()
    second.close()


def test_timers_that_are_due_together_run_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        loop, ran = asyncio.get_running_loop(), list[int]()
        for number in range(50):
            loop.call_at(1.0, ran.append, number)
        await asyncio.sleep(1.0)
        return ran

    assert run_virtual(main()) == list(range(50))


def test_timers_that_were_cancelled_do_not_run_and_do_not_pile_up() -> None:
    async def main() -> list[int]:
        loop, ran = asyncio.get_running_loop(), list[int]()
        for number in range(10_000):
            timer = loop.call_later(60.0, ran.append, number)
            if number % 5000:
                timer.cancel()
        assert isinstance(loop, VirtualClockLoop)
        assert loop.timers < 3000
        await asyncio.sleep(61.0)
        return ran

    assert run_virtual(main()) == [0, 5000]


def test_a_closed_loop_takes_no_timers() -> None:
    loop = VirtualClockLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1.0, print)
