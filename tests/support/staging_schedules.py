"""One training loop over staged batches on a fake device, in an order of events that a seed chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from random import Random
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import stoker
from stoker.errors import ConfigError, StokerError
from stoker_torch import RaggedColumn, _readahead, _staging
from stoker_torch._staging import StagedIteration, Staging
from support.fake_device import FakeDevice, FakeStream, Scheduler


class ScheduledLock:
    """A reentrant lock of threads that take turns."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: threading.Thread | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.current_thread()
        self._scheduler.switch(until=lambda: self._owner in (None, me))
        self._owner, self._depth = me, self._depth + 1

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None


class ScheduledPool:
    """A thread pool of one thread that takes turns."""

    def __init__(self, scheduler: Scheduler, begin: Callable[[], None]) -> None:
        self._scheduler, self._begin = scheduler, begin
        self._works: list[Callable[[], None]] = []
        self._is_closed = self._is_over = False
        self._thread = threading.Thread(target=self._run, name="staging", daemon=True)
        scheduler.adopt(self._thread)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a function."""
        self._works.append(work)

    def _run(self) -> None:
        self._scheduler.wait_for_turn()
        try:
            self._begin()
            while True:
                self._scheduler.switch(until=lambda: bool(self._works) or self._is_closed)
                if not self._works:
                    return
                self._works.pop(0)()
        finally:
            self._is_over = True
            self._scheduler.leave()

    def close(self) -> None:
        """Wait for the running function, and end the thread."""
        self._is_closed = True
        self._scheduler.switch(until=lambda: self._is_over)


class Schedule:
    """A training loop with random batches, consumer and order of events.

    Args:
        seed: fixes everything.

    Attributes:
        wrong: what a kernel found instead of its batch.
        events: what the loop did.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.scheduler = Scheduler(seed)
        self.device = FakeDevice(self.scheduler, threading.current_thread())
        self.wrong: list[str] = []
        self.events: list[str] = []
        self._is_static = self._random.random() < 0.3
        self._has_transform = self._random.random() < 0.4
        self._pins = self._random.random() < 0.7
        self._streams = [self.device.default_stream, self.device.create_stream()]
        self._kept: list[tuple[Any, int, FakeStream]] = []
        self._now_seconds = 0.0
        self._is_closing = False
        self.device.may_wait = self._may_wait

    def run(self) -> None:
        """Train, then check what every kernel read."""
        with ExitStack() as patches:
            for each in self._patches():
                patches.enter_context(each)
            self.scheduler.join()
            staging = self.staging = Staging(
                lambda: self.device,
                ahead=self._random.randint(1, 3),
                is_static=self._is_static,
            )
            staging.on_copy = (lambda copy: None) if self._random.random() < 0.2 else None
            for epoch in range(self._random.randint(1, 2)):
                self._train(staging, epoch)
            for batch, number, stream in self._kept:
                self._read(batch, number, stream)
            self._kept.clear()
            self._is_closing = True
            staging.close()
            self.scheduler.leave()
            self.scheduler.drain()

    def _patches(self) -> list[AbstractContextManager[Any]]:
        lock = partial(ScheduledLock, self.scheduler)
        return [
            patch.object(_readahead, "threading", SimpleNamespace(RLock=lock, get_ident=threading.get_ident)),
            patch.object(_readahead, "time", SimpleNamespace(perf_counter=self._tell_time, sleep=self._sleep)),
            patch.object(_readahead, "_no_fork", lock()),
            patch.object(_staging, "ThreadPool", lambda threads, name, begin: ScheduledPool(self.scheduler, begin)),
        ]

    def _tell_time(self) -> float:
        self._now_seconds += self._random.choice([0.0001, 0.1])  # the loop comes back at once, or is busy
        return self._now_seconds

    def _sleep(self, _: float) -> None:
        for _ in range(self._random.randint(1, 3)):
            self.scheduler.switch()

    def _may_wait(self) -> bool:
        """Return whether the loop may wait: at the end, or if the link is the bottleneck."""
        stager = self.staging._stager
        return self._is_closing or (stager is not None and len(stager._running) > _staging._MAX_RUNNING_COPIES)

    # The source of batches, on the staging thread.

    def _values(self, number: int) -> tuple[list[int], list[int]]:
        size = 4 if self._is_static else 1 + number % 4
        return [number * 7 + 1] * size, [number * 5 + 2 + place for place in range(size)]

    def _source(self, epoch: int, count: int, failing: int | None) -> Callable[[], tuple[int, Any] | None]:
        numbers = iter(range(epoch * 100, epoch * 100 + count))

        def take() -> tuple[int, Any] | None:
            self.scheduler.switch()
            number = next(numbers, None)
            if number is None:
                return None
            if number == failing:
                raise OSError(f"batch {number}")
            self.events.append("ahead" if threading.current_thread() is not self.device.training_thread else "asked")
            x, tokens = self._values(number)
            return number, {"x": self._make(x), "tokens": self._column(tokens), "name": [f"batch {number}"]}

        return take

    def _make(self, values: list[int]) -> torch.Tensor:
        """Return values gathered into page-locked memory, or in other memory."""
        array = np.array(values, np.int64)
        if not self._pins:
            return torch.from_numpy(array)
        memory = self.staging.buffers.empty(array.nbytes).view(np.int64)
        memory[:] = array
        return torch.from_numpy(memory)

    def _column(self, tokens: list[int]) -> RaggedColumn:
        values, offsets = torch.tensor(tokens), torch.tensor([0, 1, len(tokens)])
        column = RaggedColumn(stoker.Ragged("int64"), values, offsets)
        if not self._pins:
            return column
        block = column.join(self.staging.buffers.empty)
        start = values.nbytes
        return RaggedColumn(column.column, block[:start].view(torch.int64), block[start:].view(torch.int64))

    def _transform(self, number: int, batch: Any) -> Any:
        self.events.append("transform")
        copy = torch.from_numpy(self.device._allocate(batch["x"].nbytes)).view(torch.int64)
        self.device.overwrite(copy, batch["x"])
        return {**batch, "y": copy}

    # The training loop.

    def _train(self, staging: Staging, epoch: int) -> None:
        count = self._random.randint(0, 5)
        failing = epoch * 100 + self._random.randint(0, 4) if self._random.random() < 0.15 else None
        is_ready = self._random.choice([lambda: True, lambda: self._random.random() < 0.5])
        transform = self._transform if self._has_transform else None
        iteration = staging.iterate(self._source(epoch, count, failing), transform, is_ready=is_ready)
        expected = epoch * 100
        is_shared = not self._is_static and self._random.random() < 0.25
        while True:
            self.device._current[threading.current_thread()] = self._random.choice(self._streams)
            if self._random.random() < 0.15:
                self._capture(iteration)
            if self._random.random() < 0.05:
                self.events.append("break")
                iteration.readahead.end()
                assert iteration.next() is None
                return
            try:
                taken = self._take_shared(iteration) if is_shared else iteration.next()
            except OSError as error:
                assert expected == failing, error  # noqa: PT017 - the schedule's own check, outside of a test
                self.events.append("error")
                return
            except ConfigError:
                self.events.append("shape")
                return
            if taken is None:
                assert expected == epoch * 100 + count, f"{expected} batches of {count}"
                return
            assert taken[0] == expected, f"batch {taken[0]} in place of {expected}"
            self._step(*taken)
            del taken
            expected += 1

    def _take_shared(self, iteration: StagedIteration[int]) -> tuple[int, Any] | None:
        """Take a batch, and read it under several streams, as the places of many batches are."""
        iteration.check_capture()
        staged = iteration.readahead.next()
        if staged is None:
            return None
        self.events.append("shared")
        for _ in range(self._random.randint(1, 3)):
            self.device._current[threading.current_thread()] = self._random.choice(self._streams)
            iteration.use(staged)
            self._read(staged.batch, staged.tag, self.device.current_stream())
        return staged.tag, staged.batch

    def _step(self, number: int, batch: Any) -> None:
        assert batch["name"] == [f"batch {number}"]
        stream = self.device.current_stream()
        for _ in range(self._random.randint(0, 2)):
            self._read(batch, number, stream)
        if not self._is_static and self._random.random() < 0.3:
            self._kept.append((batch, number, stream))
        if self._kept and self._random.random() < 0.2:
            self._read(*self._kept.pop())
        for _ in range(self._random.randint(0, 3)):
            self.scheduler.switch()

    def _read(self, batch: Any, number: int, stream: FakeStream) -> None:
        """Queue a kernel that reads a batch on the stream that was current when it was yielded."""
        before = self.device.current_stream()
        self.device._current[threading.current_thread()] = stream
        x, tokens = self._values(number)
        offsets = [0, 1, len(tokens)]
        found = {"x": batch["x"], "tokens": batch["tokens"].values, "offsets": batch["tokens"].offsets}
        wanted = {"x": x, "tokens": tokens, "offsets": offsets}
        if self._has_transform:
            found, wanted = found | {"y": batch["y"]}, wanted | {"y": x}
        for name, tensor in found.items():
            self.device.read_later(tensor, self._checker(f"{name} of batch {number}", wanted[name]))
        self.device._current[threading.current_thread()] = before

    def _checker(self, what: str, values: list[int]) -> Callable[[bytes], None]:
        wanted = np.array(values, np.int64).tobytes()

        def check(found: bytes) -> None:
            self.events.append("read")
            if found != wanted:
                self.wrong.append(f"{what}: {np.frombuffer(found, np.int64)} in place of {values}")

        return check

    def _capture(self, iteration: StagedIteration[int]) -> None:
        self.events.append("capture")
        self.device.capturing = threading.current_thread()
        for _ in range(self._random.randint(0, 6)):
            self.scheduler.switch()
        if self._random.random() < 0.3:
            try:
                iteration.next()
            except StokerError as error:
                assert "captures a graph" in str(error)  # noqa: PT017 - the schedule's own check, outside of a test
            else:
                raise AssertionError("a batch during a capture")
        self.device.capturing = None
