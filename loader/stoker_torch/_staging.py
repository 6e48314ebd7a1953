"""Copies batches to a device ahead of the training loop, so that neither the device nor the loop waits for a copy.

While the loop is busy, a thread takes the next batches from their source, in page-locked memory of the host, and queues
the copy of each on a stream of its own, followed by an event. The loop gets the tensors at once: only its current
stream waits for the event. The host memory of a batch is used again when its copy is complete, the device memory when
the streams that the loop used have passed its last use.

After GeePS: H. Cui et al., "GeePS: Scalable Deep Learning on Distributed GPUs with a GPU-Specialized Parameter Server"
(EuroSys 2016), section 3.2, which stages input data through pinned memory in the background.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from stoker._base.fetch_record import DeviceCopy
from stoker.errors import ConfigError, StokerError
from stoker_torch._devices import Device, Event, Stream
from stoker_torch._readahead import Readahead
from stoker_torch._tensors import BufferPool, RaggedColumn, bytes_of, map_tensors
from stoker_torch._user_functions import ThreadPool

T = TypeVar("T")

_MAX_RUNNING_COPIES = 3
"""Copies that may be incomplete while another batch is gathered, into the page-locked memory of a fourth. One is usual:
a link copies faster than a core gathers. Gathering waits only if the link is the bottleneck."""


@dataclass(slots=True)
class StagedBatch(Generic[T]):
    """A batch whose copy is queued.

    Attributes:
        tag: what its source gave with the batch.
        batch: the batch, on the device.
        tensors: all tensors of the batch.
        ready: event after its copy, and after the user's function.
        user: stream that waits for it; None before the loop has it.
    """

    tag: T
    batch: Any
    tensors: list[torch.Tensor]
    ready: Event
    user: Stream | None = None


@dataclass(slots=True)
class _RunningCopy:
    """A copy that may not be complete.

    Attributes:
        sources: tensors of the host that it reads.
        copied: event after it.
        begun: timed event before it, if it is recorded.
    """

    sources: list[torch.Tensor]
    copied: Event
    begun: Event | None


class HostBuffers(BufferPool):
    """Page-locked buffers that batches are gathered into, or copied into, on their way to a device.

    A buffer is used again when no tensor refers to it; staging refers to a batch until its copy is complete.

    Args:
        device: function that returns the device.
    """

    def __init__(self, device: Callable[[], Device]) -> None:
        super().__init__()
        self._device = device

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        return self._device().allocate_host(size_bytes)

    def _is_read(self, buffer: Any) -> bool:
        return True


Take = Callable[[], "tuple[T, Any] | None"]
"""Function that returns the next batch with a tag, or None after the last one."""
Transform = Callable[[Any, Any], Any]
"""Function of a batch's tag and the batch on the device, which returns the batch to be yielded."""


class Stager:
    """Queues the copies of batches, on one thread.

    Args:
        device: device to copy to.
        buffers: page-locked buffers.
        on_copy: function that receives the record of each copy; default none.
    """

    def __init__(
        self,
        device: Device,
        buffers: BufferPool,
        on_copy: Callable[[DeviceCopy], None] | None = None,
    ) -> None:
        self._device, self._buffers, self._on_copy = device, buffers, on_copy
        self._stream = device.create_stream()
        self._running: deque[_RunningCopy] = deque()
        self._origin: tuple[Event, float] | None = None
        self._sources: list[torch.Tensor] = []

    def free_buffers(self, limit: int = _MAX_RUNNING_COPIES) -> None:
        """Release the host memory of complete copies; wait if more than ``limit`` are not complete."""
        while self._running:
            if len(self._running) > limit:
                self._running[0].copied.synchronize()
            elif not self._running[0].copied.query():
                return
            self._report(self._running.popleft())

    def stage_next(self, take: Take[T], transform: Transform | None = None) -> StagedBatch[T] | None:
        """Take a batch, queue its copy, and a function behind it; return None after the last one."""
        self.free_buffers()
        with self._device.use_stream(self._stream):  # also for what the source does on the device
            taken = take()
            return None if taken is None else self._stage(*taken, transform)

    def _stage(self, tag: T, batch: Any, transform: Transform | None) -> StagedBatch[T]:
        begun = None if self._on_copy is None else self._record(is_timed=True)
        self._sources = []
        try:
            batch = map_tensors(self._copy, batch)
        finally:
            copied = self._record(is_timed=begun is not None)  # also behind the copies before an error
            self._running.append(_RunningCopy(self._sources, copied, begun))
            self._sources = []
        ready = copied
        if transform is not None:
            batch = transform(tag, batch)
            ready = self._record()
        return StagedBatch(tag, batch, tensors_of(batch), ready)

    def _record(self, *, is_timed: bool = False) -> Event:
        if is_timed and self._origin is None:
            origin = self._device.create_event(is_timed=True)
            self._stream.record_event(origin)
            self._origin = origin, time.perf_counter()  # complete at once: the stream has no work yet
        event = self._device.create_event(is_timed=is_timed)
        self._stream.record_event(event)
        return event

    def _report(self, copy: _RunningCopy) -> None:
        if copy.begun is None or self._on_copy is None or self._origin is None:
            return
        event, seconds = self._origin
        begin, end = (seconds + self._device.elapsed_seconds(event, each) for each in (copy.begun, copy.copied))
        self._on_copy(DeviceCopy(self._device.name, begin, end, sum(each.nbytes for each in copy.sources)))

    def _copy(self, value: torch.Tensor | RaggedColumn) -> torch.Tensor | RaggedColumn:
        if isinstance(value, RaggedColumn):
            return self._copy_column(value)
        if value.device.type != "cpu" or value.layout != torch.strided:
            return self._device.copy(value)
        source = self._pin(value)
        self._sources.append(source)
        return self._device.copy(source)

    def _copy_column(self, column: RaggedColumn) -> RaggedColumn:
        """Queue one copy of the values and offsets of a column; the host keeps its offsets."""
        if column.values.device.type != "cpu":
            return column
        block = column.find_block()
        if block is None or not self._buffers.has(block):
            block = column.join(self._buffers.empty)
        self._sources.append(block)
        return column.on_device(self._device.copy(block))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in a buffer, with the same strides if it is dense.

        One in page-locked memory of its source is copied, too: the source may write to it while the device reads.
        """
        if not tensor.nbytes or self._buffers.has(tensor):
            return tensor
        memory = self._buffers.empty(tensor.nbytes)
        pinned = torch.from_numpy(memory).view(tensor.dtype)
        if tensor.is_contiguous():
            memory[:] = bytes_of(tensor)
            return pinned.view(tensor.shape)
        layout = torch.empty_like(tensor, device="meta")
        return pinned.as_strided(tensor.shape, layout.stride()).copy_(tensor.detach())


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors in a batch, in a fixed order; two of a ragged column."""
    found: list[torch.Tensor] = []

    def add(value: torch.Tensor | RaggedColumn) -> torch.Tensor | RaggedColumn:
        found.extend([value.values, value.offsets] if isinstance(value, RaggedColumn) else [value])
        return value

    map_tensors(add, batch)
    return found


class StagedIteration(Generic[T]):
    """The batches of one iteration on the device, for the training loop.

    Args:
        staging: staging of the loader.
        readahead: readahead of staged batches.
    """

    def __init__(self, staging: Staging, readahead: Readahead[StagedBatch[T]]) -> None:
        self._staging, self.readahead = staging, readahead

    def next(self) -> tuple[T, Any] | None:
        """Return the next batch with its tag, or None after the last one; the host does not wait for its copy.

        Raises:
            StokerError: the current stream is capturing a graph, whose replays would all use this batch.
        """
        self.check_capture()
        staged = self.readahead.next()
        if staged is None:
            return None
        stream = self.use(staged)
        batch = staged.batch if self._staging.static is None else self._staging.static.update(staged, stream)
        return staged.tag, batch

    def check_capture(self) -> None:
        """Check that the current stream is not capturing a graph.

        Raises:
            StokerError: it is.
        """
        if self._staging.device.is_capturing():
            raise StokerError(
                "a batch was requested while the current stream captures a graph: request it before the capture, and "
                "replay the graph for later batches (static=True yields them in the same tensors)"
            )

    def use(self, staged: StagedBatch[T]) -> Stream:
        """Make the current stream wait for a batch, and its memory for the stream's use of it; return the stream."""
        device = self._staging.device
        stream = device.current_stream()
        if stream != staged.user:
            stream.wait_event(staged.ready)
            for tensor in staged.tensors:
                device.record_use(tensor, stream)
            staged.user = stream
        return stream


@dataclass(slots=True)
class StaticBatch:
    """The tensors of the first batch, which all later ones are copied into.

    Args:
        device: device of the batches.
    """

    device: Device
    _tensors: list[torch.Tensor] | None = None
    _stream: Stream | None = None

    def update(self, staged: StagedBatch[Any], stream: Stream) -> Any:
        """Copy a batch into the tensors of the first one, on the current stream, and return it in them.

        Raises:
            ConfigError: its tensors have other shapes.
        """
        if self._tensors is None:
            self._tensors, self._stream = staged.tensors, stream
            return staged.batch
        shapes, new_shapes = _shapes_of(self._tensors), _shapes_of(staged.tensors)
        if shapes != new_shapes:
            raise ConfigError(
                f"static=True yields every batch in the tensors of the first one, which have {shapes}; this batch has "
                f"{new_shapes}: give drop_last=True, and a collate or batch_transform that pads ragged columns"
            )
        if self._stream != stream:  # which may still read the batch before this one
            used = self.device.create_event()
            assert self._stream is not None  # noqa: S101 - set with the tensors
            self._stream.record_event(used)
            stream.wait_event(used)
            self._stream = stream
        for target, source in zip(self._tensors, staged.tensors, strict=True):
            self.device.overwrite(target, source)
        tensors = iter(self._tensors)
        return map_tensors(partial(_replace_tensors, tensors), staged.batch)


def _shapes_of(tensors: list[torch.Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(each.dtype, tuple(each.shape)) for each in tensors]


def _replace_tensors(tensors: Iterator[torch.Tensor], value: torch.Tensor | RaggedColumn) -> Any:
    return value.with_tensors(next(tensors), next(tensors)) if isinstance(value, RaggedColumn) else next(tensors)


class Staging:
    """Copies batches to a device ahead of a training loop, for one iteration after the other.

    Args:
        open_device: function that returns the device; called for the first iteration, in its thread.
        ahead: number of batches on the device ahead of the loop.
        is_static: whether all batches are yielded in the tensors of the first one.

    Attributes:
        buffers: page-locked buffers, for batches that are gathered to be staged.
        on_copy: function that receives the record of each copy, None if there is none; set before the first iteration.
    """

    def __init__(self, open_device: Callable[[], Device], *, ahead: int, is_static: bool = False) -> None:
        self._open_device, self._ahead, self._is_static = open_device, ahead, is_static
        self.on_copy: Callable[[DeviceCopy], None] | None = None
        self._pid = os.getpid()
        self._device: Device | None = None
        self._stager: Stager | None = None
        self._threads: ThreadPool | None = None
        self._readahead: weakref.ref[Readahead[Any]] | None = None
        self.static: StaticBatch | None = None
        self.buffers = HostBuffers(lambda: self.device)

    @property
    def device(self) -> Device:
        """The device."""
        if self._device is None:
            self._device = self._open_device()
        return self._device

    def iterate(
        self,
        take: Take[T],
        transform: Transform | None = None,
        *,
        count: int = sys.maxsize,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> StagedIteration[T]:
        """Begin to stage the batches of a source; an earlier iteration ends.

        Args:
            take: function that returns the next batch with a tag, or None after the last one; called by one thread at a
                time. It must not refer to the iteration.
            transform: function of the batch on the device, run on the staging stream; default none.
            count: maximum number of batches.
            is_ready: function that returns whether ``take`` would return without waiting; default always.

        Raises:
            StokerError: this process was forked from one that stages.
        """
        if self._pid != os.getpid():
            raise StokerError(
                f"a process that was forked cannot copy to {self.device.name}: construct the loader in the process "
                "that trains, or start that with multiprocessing's 'spawn'"
            )
        self.end()
        if self._stager is None:
            self._stager = Stager(self.device, self.buffers, self.on_copy)
            self.static = StaticBatch(self.device) if self._is_static else None
        if self._threads is None:
            self._threads = ThreadPool(1, "stoker-stage", self.device.enter_thread)
        make = partial(self._stager.stage_next, take, transform)
        readahead = Readahead(make, count, is_ready, self._threads, self._ahead)
        self._readahead = weakref.ref(readahead)
        return StagedIteration(self, readahead)

    def end(self) -> None:
        """End the current iteration; does not wait for the thread."""
        readahead = None if self._readahead is None else self._readahead()
        if readahead is not None:
            readahead.end()

    def close(self) -> None:
        """End the current iteration and the thread, and release the page-locked memory; it may begin again."""
        self.end()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()
        if self._pid == os.getpid() and self._stager is not None:
            self._stager.free_buffers(0)
            self.buffers.clear()
