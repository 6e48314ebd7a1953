"""A device whose work runs in any order that its streams and events allow, and threads that take turns by a seed.

Memory is real: a copy moves bytes when the scheduler runs it, freed device memory is used again at once, and the fake
holds addresses, not tensors, so that whatever is too early reads or overwrites wrong bytes.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from stoker_torch import _device_stage, _loader
from stoker_torch._devices import BlockingDevice

_POISON = 0xEE


class DeadlockError(AssertionError):
    """No thread and no stream can go on."""


class Scheduler:
    """Lets one thread, or one piece of a stream's work, run at a time, chosen by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._turns: dict[threading.Thread, threading.Semaphore] = {}
        self._waiting: dict[threading.Thread, Callable[[], bool]] = {}
        self.streams: list[FakeStream] = []
        self.switches = 0

    def join(self) -> None:
        """Add the calling thread, which has the turn or waits for its first one."""
        self._turns.setdefault(threading.current_thread(), threading.Semaphore(0))

    def leave(self) -> None:
        """Remove the calling thread, which has the turn, and pass the turn on."""
        del self._turns[threading.current_thread()]
        following = self._choose()
        if following is not None:
            self._turns[following].release()

    def adopt(self, thread: threading.Thread) -> None:
        """Add a thread that is about to start."""
        self._turns[thread] = threading.Semaphore(0)

    def wait_for_turn(self) -> None:
        """Wait for the first turn of the calling thread."""
        self._turns[threading.current_thread()].acquire()

    def switch(self, until: Callable[[], bool] | None = None) -> None:
        """Give others a turn; with ``until``, come back only when it returns true."""
        me = threading.current_thread()
        if me not in self._turns:  # a thread that is not explored
            return
        if until is not None:
            self._waiting[me] = until
        following = self._choose()
        if following is None:
            raise DeadlockError(f"{me.name} waits for ever")
        if following is not me:
            self._turns[following].release()
            self._turns[me].acquire()
        self._waiting.pop(me, None)

    def _choose(self) -> threading.Thread | None:
        """Run some work of streams, then return the thread that is to go on; None if there is none."""
        while True:
            self.switches += 1
            ready = [each for each in self._turns if each not in self._waiting or self._waiting[each]()]
            runnable = [stream for stream in self.streams if stream.is_runnable()]
            if not ready and not runnable:
                if not self._turns:
                    return None
                raise DeadlockError(f"waiting: {[each.name for each in self._turns]}")
            if runnable and (not ready or self._random.random() < 0.4):
                self._random.choice(runnable).run_one()
            else:
                return self._random.choice(ready)

    def drain(self) -> None:
        """Run all work that is left."""
        while runnable := [stream for stream in self.streams if stream.is_runnable()]:
            self._random.choice(runnable).run_one()


@dataclass(eq=False)
class FakeEvent:
    """A point in a stream."""

    device: FakeDevice
    is_complete: bool = True
    version: int = 0

    def query(self) -> bool:
        """Return whether the work before it is done."""
        self.device.check_call()
        return self.is_complete

    def synchronize(self) -> None:
        """Wait for the work before it."""
        self.device.check_call()
        if threading.current_thread() is self.device.training_thread and not self.device.may_wait():
            raise AssertionError("the training thread waits for the device")
        self.device.scheduler.switch(until=lambda: self.is_complete)


@dataclass(eq=False)
class FakeStream:
    """A queue of work."""

    device: FakeDevice
    work: deque[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=deque)

    def is_runnable(self) -> bool:
        """Return whether the first piece of work can run."""
        return bool(self.work) and self.work[0][0]()

    def run_one(self) -> None:
        """Run the first piece of work."""
        self.work.popleft()[1]()

    def queue(self, run: Callable[[], None], can_run: Callable[[], bool] = lambda: True) -> None:
        """Queue a piece of work."""
        self.work.append((can_run, run))

    def wait_event(self, event: FakeEvent) -> None:
        """Make later work wait for an event as it is recorded now."""
        self.device.check_call()
        version = event.version
        self.queue(lambda: None, lambda: event.is_complete or event.version != version)
        self.device.scheduler.switch()

    def record_event(self, event: FakeEvent) -> None:
        """Complete an event after the work so far."""
        self.device.check_call()
        event.is_complete = False
        event.version += 1
        version = event.version

        def complete() -> None:
            if event.version == version:
                event.is_complete = True

        self.queue(complete)
        self.device.scheduler.switch()


def _move(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


@dataclass(eq=False)
class _Block:
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    stream: FakeStream
    users: set[FakeStream] = field(default_factory=set)
    pending: list[FakeEvent] = field(default_factory=list)


class FakeDevice:
    """A device for :class:`stoker_torch._staging.Staging`; its tensors are tensors of the host.

    Args:
        scheduler: decides what runs when.
        training_thread: thread that must not wait for the device.

    Attributes:
        may_wait: function that returns whether it may wait nevertheless.
        capturing: thread that captures a graph.
    """

    name = "fake:0"

    def __init__(self, scheduler: Scheduler, training_thread: threading.Thread) -> None:
        self.scheduler, self.training_thread = scheduler, training_thread
        self._current: dict[threading.Thread, FakeStream] = {}
        self._host: list[torch.Tensor] = []
        self._free: list[_Block] = []
        self._used: dict[int, _Block] = {}
        self._permitted: set[threading.Thread] = set()
        self.capturing: threading.Thread | None = None
        self.may_wait: Callable[[], bool] = lambda: False
        self.default_stream = self.create_stream()
        self.allocated_blocks = 0

    def check_call(self) -> None:
        """Fail if a capture of another thread forbids a call, as CUDA's global mode does."""
        me = threading.current_thread()
        if self.capturing not in (None, me) and me not in self._permitted:
            raise AssertionError("a call while another thread captures a graph")
        if self.capturing is me:
            raise AssertionError("a call of staging becomes part of the graph")

    def enter_thread(self) -> None:
        """Permit calls during captures."""
        self._permitted.add(threading.current_thread())

    def create_stream(self) -> FakeStream:
        """Return a new stream."""
        stream = FakeStream(self)
        self.scheduler.streams.append(stream)
        return stream

    def current_stream(self) -> FakeStream:
        """Return the thread's current stream."""
        return self._current.get(threading.current_thread(), self.default_stream)

    @contextmanager
    def use_stream(self, stream: FakeStream) -> Iterator[None]:
        """Set the thread's current stream."""
        before = self.current_stream()
        self._current[threading.current_thread()] = stream
        yield
        self._current[threading.current_thread()] = before

    def create_event(self, *, is_timed: bool = False) -> FakeEvent:
        """Return a new event."""
        return FakeEvent(self)

    def elapsed_seconds(self, begin: FakeEvent, end: FakeEvent) -> float:
        """Return a millisecond for complete events."""
        assert begin.is_complete
        assert end.is_complete
        return 0.001

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Return memory that stays where it is."""
        self.check_call()
        tensor = torch.full((size_bytes,), _POISON, dtype=torch.uint8)
        self._host.append(tensor)
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(each.data_ptr() <= address < each.data_ptr() + each.nbytes for each in self._host)

    def _allocate(self, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        stream = self.current_stream()
        for block in self._free:
            block.pending = [event for event in block.pending if not event.is_complete]
            if block.stream is stream and block.memory.nbytes == size_bytes and not block.pending:
                self._free.remove(block)
                break
        else:
            block = _Block(np.full(size_bytes, _POISON, np.uint8), stream)
            self.allocated_blocks += 1
        block.users = set()
        array = block.memory[:]
        address = array.ctypes.data
        self._used[address] = block
        weakref.finalize(array, self._release, address)
        return array

    def _release(self, address: int) -> None:
        block = self._used.pop(address)
        for stream in block.users - {block.stream}:
            event = FakeEvent(self, is_complete=False, version=1)
            stream.queue(lambda event=event: setattr(event, "is_complete", True))  # type: ignore[misc]
            block.pending.append(event)
        self._free.insert(0, block)  # used again as soon as it may be

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy of pinned memory into new memory of the device."""
        self.check_call()
        if not tensor.nbytes:
            return tensor.clone()
        assert self._is_pinned(tensor), "a copy from memory that is not page-locked"
        result = torch.from_numpy(self._allocate(tensor.nbytes)).view(tensor.dtype)
        target, source, size = result.data_ptr(), tensor.data_ptr(), tensor.nbytes
        self.current_stream().queue(lambda: _move(target, source, size))
        self.scheduler.switch()
        return result.as_strided(tensor.shape, tensor.stride())

    def overwrite(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the device."""
        self.check_call()
        to, of, size = target.data_ptr(), source.data_ptr(), source.nbytes
        self.current_stream().queue(lambda: _move(to, of, size))
        self.scheduler.switch()

    def record_use(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """Keep the memory of a tensor for a stream."""
        self.check_call()
        address = tensor.untyped_storage().data_ptr()
        if address in self._used:
            self._used[address].users.add(stream)

    def is_capturing(self) -> bool:
        """Return whether this thread captures a graph."""
        return self.capturing is threading.current_thread()

    def read_later(self, tensor: torch.Tensor, check: Callable[[bytes], None]) -> None:
        """Queue a kernel on the current stream that reads a contiguous tensor; ``check`` gets what it finds."""
        address, size = tensor.data_ptr(), tensor.nbytes
        self.current_stream().queue(lambda: check(ctypes.string_at(address, size)))


class ImmediateDevice(BlockingDevice):
    """A device whose copies are complete at once, in other tensors of the host.

    Attributes:
        copied_bytes: number of bytes copied from page-locked memory.
        copies: number of copies.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.name = "fake:0"
        self.copied_bytes = self.copies = 0
        self.threads: set[str] = set()
        self._pinned: list[torch.Tensor] = []

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Return memory that counts as page-locked."""
        self._pinned.append(super().allocate_host(size_bytes))
        return self._pinned[-1]

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(each.data_ptr() <= address < each.data_ptr() + each.nbytes for each in self._pinned)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        assert not tensor.nbytes or self._is_pinned(tensor), "a copy from memory that is not page-locked"
        self.copies += 1
        self.copied_bytes += tensor.nbytes
        self.threads.add(threading.current_thread().name)
        return tensor.clone()


def use_device(device: ImmediateDevice, patch: pytest.MonkeyPatch) -> None:
    """Make a device of the host every accelerator that a loader or a stage is given."""
    for module in (_loader, _device_stage):
        patch.setattr(module, "check_available", lambda _: None)
        patch.setattr(module, "open_device", lambda _: device)
