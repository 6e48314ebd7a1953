"""The pool: order, bad samples, and errors of every kind at the batch they belong to."""

from __future__ import annotations

import gc
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stoker import SampleContext
from stoker.errors import SampleError, SampleTimeoutError, StokerError
from stoker_torch import StreamConfig, WorkerOptions
from stoker_torch._pool import SamplePool
from stoker_torch._user_functions import ThreadPool, Work

Pools = Callable[..., SamplePool]


@pytest.fixture
def pools() -> Iterator[Pools]:
    made: list[SamplePool] = []

    def make(config: StreamConfig, workers: int = 3, **options: Any) -> SamplePool:
        made.append(SamplePool(replace(config, workers=WorkerOptions(threads=workers, **options)), threads=1))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def pool_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stoker-pool")]


def name_of(place: int) -> str:
    return f"sample {place}"


def context_of(place: int) -> SampleContext:
    return SampleContext(seed=0, epoch=0, sample=place)


def columns(count: int, start: int = 0) -> dict[str, Any]:
    return {"x": torch.arange(start, start + count), "y": torch.arange(start, start + count) * 2}


def test_batches_and_their_samples_keep_their_order_whatever_each_takes(pools: Pools) -> None:
    delays = random.Random(0)

    def slow(value: torch.Tensor) -> int:
        time.sleep(delays.random() / 200)
        return int(value) + 1000

    pool = pools(StreamConfig(decode={"x": slow}), workers=4)
    pending = [pool.submit(columns(21, 100 * number), name_of, context_of) for number in range(5)]
    for number, batch in enumerate(pending):
        result = batch.result()
        assert result["x"].tolist() == list(range(100 * number + 1000, 100 * number + 1021))
        assert result["y"].tolist() == columns(21, 100 * number)["y"].tolist()


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("count", [1, 2, 13])
def test_every_sample_is_worked_on_once(pools: Pools, workers: int, count: int) -> None:
    seen: list[int] = []

    def note(value: torch.Tensor) -> int:
        seen.append(int(value))
        return int(value)

    pool = pools(StreamConfig(decode={"x": note}), workers)
    assert pool.submit(columns(count), name_of, context_of).result()["x"].tolist() == list(range(count))
    assert sorted(seen) == list(range(count))


def test_functions_run_in_the_pools_threads_and_batch_transform_last(pools: Pools) -> None:
    ran: list[tuple[str, str]] = []

    def noting(name: str, result: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def function(value: Any) -> Any:
            ran.append((name, threading.current_thread().name))
            return result(value)

        return function

    config = StreamConfig(
        decode={"x": noting("decode", int)},
        transform=noting("transform", lambda sample: sample["x"] + int(sample["y"])),
        collate=noting("collate", sum),
        batch_transform=noting("batch_transform", lambda total: -total),
    )
    assert pools(config, workers=1).submit(columns(3), name_of, context_of).result() == -9
    assert [name for name, _ in ran] == ["decode", "transform"] * 3 + ["collate", "batch_transform"]
    assert {thread for _, thread in ran} == {"stoker-pool-0"}


def test_a_batch_transform_alone_gets_the_columns(pools: Pools) -> None:
    pool = pools(StreamConfig(batch_transform=lambda batch: batch["x"].sum()))
    assert pool.submit(columns(5), name_of, context_of).result() == 10


def test_a_bad_sample_is_named_with_its_stage_and_cause(pools: Pools) -> None:
    decoding = pools(StreamConfig(decode={"x": lambda value: 1 // int(value)}))
    with pytest.raises(SampleError, match=r"^sample 0: decode of column 'x' failed: ZeroDivisionError") as caught:
        decoding.submit(columns(4), name_of, context_of).result()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    transforming = pools(StreamConfig(transform=lambda sample: sample["gone"] if sample["x"] == 2 else 0))
    with pytest.raises(SampleError, match=r"^sample 2: transform failed: KeyError: 'gone'"):
        transforming.submit(columns(4), name_of, context_of).result()


@pytest.mark.parametrize(
    ("stage", "config"),
    [
        ("collate", StreamConfig(collate=lambda samples: samples[99])),
        ("collate", StreamConfig(transform=lambda sample: torch.zeros(int(sample["x"])))),
        ("collate", StreamConfig(decode={"x": lambda value: np.array("text")})),
        ("batch_transform", StreamConfig(batch_transform=lambda batch: batch["gone"])),
    ],
)
def test_what_fails_on_a_whole_batch_is_typed_and_names_the_batch(
    pools: Pools, stage: str, config: StreamConfig
) -> None:
    with pytest.raises(SampleError, match=rf"^the batch that starts with sample 0: {stage} failed: ") as caught:
        pools(config).submit(columns(4), name_of, context_of).result()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", ["decode", "transform", "collate", "batch_transform"])
def test_no_exception_of_a_function_hangs_the_loop(pools: Pools, error: type[BaseException], where: str) -> None:
    def fail(_: Any) -> Any:
        raise error("from the function")

    functions: dict[str, Any] = {where: {"x": fail} if where == "decode" else fail}
    pool = pools(StreamConfig(**functions))
    for _ in range(3):
        with pytest.raises(error, match="from the function"):
            pool.submit(columns(10), name_of, context_of).result()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this, too")


def test_an_error_that_cannot_be_shown_is_a_bad_sample_as_any_other(pools: Pools) -> None:
    def fail(value: torch.Tensor) -> int:
        if value == 1:
            raise UnspeakableError
        return int(value)

    pool = pools(StreamConfig(decode={"x": fail}), max_bad_samples=1)
    assert pool.submit(columns(3), name_of, context_of).result()["x"].tolist() == [0, 0, 2]
    with pytest.raises(SampleError, match=r"sample 1: .* failed: UnspeakableError: <its __str__ raises RuntimeError>"):
        pool.submit(columns(3), name_of, context_of).result()


def test_bad_samples_are_replaced_by_the_good_ones_of_their_batch_in_turn(pools: Pools) -> None:
    def odd(value: torch.Tensor) -> int:
        if value % 2 == 0:
            raise ValueError("even")
        return int(value)

    pool = pools(StreamConfig(decode={"x": odd}), max_bad_samples=3)
    batch = pool.submit(columns(6), name_of, context_of).result()
    assert batch["x"].tolist() == [1, 1, 3, 3, 5, 5]
    assert batch["y"].tolist() == [2, 2, 6, 6, 10, 10]
    assert pool.bad_samples == 3
    with pytest.raises(SampleError, match="sample 0") as caught:
        pool.submit(columns(2), name_of, context_of).result()
    assert caught.value.__notes__ == ["max_bad_samples=3 is used up: 4 samples have failed"]
    assert pool.bad_samples == 4


def test_a_batch_without_a_good_sample_is_an_error_however_many_may_fail(pools: Pools) -> None:
    pool = pools(StreamConfig(decode={"x": lambda value: 1 // 0}), max_bad_samples=100)
    with pytest.raises(SampleError, match="sample 0"):
        pool.submit(columns(3), name_of, context_of).result()


def test_an_exception_that_a_function_returns_is_a_value(pools: Pools) -> None:
    pool = pools(StreamConfig(transform=lambda _: SampleError("a value"), collate=list))
    assert [str(value) for value in pool.submit(columns(2), name_of, context_of).result()] == ["a value"] * 2


def test_threads_start_with_the_first_batch_and_end_with_close_and_start_again(pools: Pools) -> None:
    pool = pools(StreamConfig(decode={"x": int}), workers=2)
    assert pool_threads() == []
    for _ in range(2):
        pool.submit(columns(3), name_of, context_of).result()
        assert pool_threads() == ["stoker-pool-0", "stoker-pool-1"]
        pool.close()
        pool.close()
        assert pool_threads() == []


def blocking() -> tuple[Callable[[Any], Any], threading.Event, threading.Event]:
    """Return a function that blocks and then returns its argument, with the events of its entry and its release."""
    entered, leave = threading.Event(), threading.Event()

    def stuck(value: Any) -> Any:
        entered.set()
        leave.wait()
        return value

    return stuck, entered, leave


def test_close_fails_what_is_under_way_and_queued_instead_of_letting_it_wait_forever(pools: Pools) -> None:
    stuck, entered, leave = blocking()
    pool = pools(StreamConfig(decode={"x": stuck}), workers=1)
    running, queued = (pool.submit(columns(1, start), name_of, context_of) for start in (5, 6))
    entered.wait()
    closing = threading.Thread(target=pool.close)
    closing.start()
    for batch in (running, queued):
        with pytest.raises(StokerError, match="closed"):
            batch.result()
    leave.set()
    closing.join()
    assert pool_threads() == []


def test_a_pool_that_is_closed_while_it_is_given_a_batch_starts_no_thread_again(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, submit, parts = pools(StreamConfig(decode={"x": int}), workers=2), ThreadPool.submit, list[Work]()

    def closing_behind_the_first(threads: ThreadPool, part: Work) -> None:
        submit(threads, part)
        parts.append(part)
        if len(parts) == 1:
            pool.close()

    monkeypatch.setattr(ThreadPool, "submit", closing_behind_the_first)
    with pytest.raises(StokerError, match="closed"):
        pool.submit(columns(40), name_of, context_of)
    assert len(parts) == 1
    assert pool_threads() == []


def test_no_thread_starts_while_the_interpreter_is_ending(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    with pytest.raises(StokerError, match="closed"):
        pools(StreamConfig(decode={"x": int})).submit(columns(3), name_of, context_of)
    assert pool_threads() == []


def test_close_leaves_a_function_that_does_not_return_behind_and_names_it(
    pools: Pools, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_torch._user_functions._CLOSE_SECONDS", 0.1)
    stuck, entered, leave = blocking()
    pool = pools(StreamConfig(transform=stuck), workers=2)
    pool.submit(columns(2, 5), name_of, context_of)
    entered.wait()
    pool.close()
    (message,) = caplog.messages
    assert message.startswith("a thread of the loader is still running: transform of sample ")
    assert re.search(r"has not returned for 0\.\d s( \(and 1 more\))?$", message)
    leave.set()
    assert pool.submit(columns(2), name_of, context_of).result()["x"].tolist() == [0, 1]  # with new threads
    pool.close()


@pytest.mark.parametrize(
    ("stage", "what"),
    [
        ("decode", "decode of column 'x' of sample [02]"),
        ("transform", "transform of sample [02]"),
        ("collate", "collate of the batch that starts with sample 0"),
        ("batch_transform", "batch_transform of the batch that starts with sample 0"),
    ],
)
def test_a_batch_that_is_late_names_the_sample_and_the_stage_and_the_next_gets_other_threads(
    pools: Pools, stage: str, what: str
) -> None:
    stuck, _, leave = blocking()
    functions: dict[str, Any] = {stage: {"x": stuck} if stage == "decode" else stuck}
    pool = pools(StreamConfig(**functions), workers=1, timeout_seconds=0.1)
    pending = pool.submit(columns(3), name_of, context_of)
    with pytest.raises(SampleTimeoutError, match=rf"timeout_seconds=0\.1: {what} has not returned for ") as caught:
        pending.result()
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, SampleError)
    leave.set()
    pool.submit(columns(3), name_of, context_of).result()


def test_a_timeout_that_a_function_raises_is_its_own(pools: Pools) -> None:
    def fail(_: Any) -> Any:
        raise TimeoutError("of a connection")

    pool = pools(StreamConfig(transform=fail), timeout_seconds=60)
    with pytest.raises(SampleError, match="transform failed: TimeoutError: of a connection") as caught:
        pool.submit(columns(3), name_of, context_of).result()
    assert not isinstance(caught.value, SampleTimeoutError)


def test_an_abandoned_batch_is_not_worked_on_any_further(pools: Pools) -> None:
    entered, leave = threading.Event(), threading.Event()
    seen: list[int] = []

    def stuck(value: torch.Tensor) -> int:
        seen.append(int(value))
        entered.set()
        leave.wait()
        return int(value)

    pool = pools(StreamConfig(decode={"x": stuck}), workers=1)
    abandoned = pool.submit(columns(20), name_of, context_of)
    entered.wait()
    abandoned.fail(StokerError("left"))
    leave.set()
    pool.submit(columns(1, 100), name_of, context_of).result()
    assert seen == [0, 100]


def test_a_forgotten_pool_ends_its_threads_and_keeps_no_batch() -> None:
    pool = SamplePool(StreamConfig(decode={"x": int}), threads=1)
    pending = pool.submit(columns(3), name_of, context_of)
    pool.submit(columns(3), name_of, context_of).result()  # the one thread is through with the first
    watched = weakref.ref(pending)
    del pending
    gc.collect()
    assert watched() is None
    del pool
    gc.collect()
    assert pool_threads() == []


@pytest.mark.parametrize(
    ("result", "dtype", "shape"),
    [
        (lambda x: int(x), torch.int64, (3,)),
        (lambda x: float(x), torch.float64, (3,)),
        (lambda x: float(x) if x == 1 else int(x), torch.float32, (3,)),
        (lambda x: int(x) if x == 1 else float(x), torch.float64, (3,)),
        (lambda x: np.full(2, x) if x else torch.zeros(2), torch.float32, (3, 2)),
        (lambda x: bool(x), torch.bool, (3,)),
        (lambda x: np.float64(x), torch.float64, (3,)),
        (lambda x: np.int16(x), torch.int16, (3,)),
        (lambda x: np.full((2, 2), x), torch.int64, (3, 2, 2)),
        (lambda x: np.full((2, 2), x)[:, ::-1], torch.int64, (3, 2, 2)),
        (lambda x: torch.full((4,), float(x)), torch.float32, (3, 4)),
    ],
)
def test_decoded_values_of_one_type_and_shape_are_stacked(
    pools: Pools, result: Callable[[Any], Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    batch = pools(StreamConfig(decode={"x": result})).submit(columns(3), name_of, context_of).result()
    assert batch["x"].dtype == dtype
    assert batch["x"].shape == shape
    assert batch["x"].reshape(3, -1)[:, 0].to(torch.int64).tolist() in ([0, 1, 2], [0, 1, 1])


@pytest.mark.parametrize(
    "result",
    [
        lambda x: "text",
        lambda x: None,
        lambda x: torch.zeros(int(x)),
        lambda x: np.zeros(int(x)),
        lambda x: int(x) if x else "mixed",
    ],
)
def test_other_decoded_values_make_a_list(pools: Pools, result: Callable[[Any], Any]) -> None:
    batch = pools(StreamConfig(decode={"x": result})).submit(columns(3), name_of, context_of).result()
    assert isinstance(batch["x"], list)
    assert len(batch["x"]) == 3
