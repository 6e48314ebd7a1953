"""Batches that a DataLoader's worker processes send to the training process, in shared memory that is used again.

torch sends each tensor in a shared file of its own: the worker copies the tensor into fresh pages, and the training
process connects to the worker for the file descriptor, which takes longer than making a small batch. Here a worker
keeps a few buffers. Large columns are gathered into free ones, and the other tensors of a batch are copied into one.
The worker sends the numbers of the buffers, and the file descriptor of each with its first batch. The training process
maps each buffer once. When no tensor in a buffer is left, it sets the last byte of the buffer to free.

The memory is outside /dev/shm, which containers limit to 64 MB. It is freed when the worker has ended and none of its
batches is left.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker._fetch.gather import FREE_ARRAY_REFERENCES, BatchArrays
from stoker.errors import StokerError
from stoker_torch._tensors import RaggedColumn, gather_rows_into

_MIN_SHARED_BYTES = 16 << 10
"""Less is sent through the pipe."""
_MIN_GATHERED_BYTES = 256 << 10
"""Smaller columns are gathered elsewhere, and copied into one buffer: the copy takes less time than another buffer."""
_MAX_BUFFERS = 32
"""Buffers of a worker, each with a file descriptor. If the training loop keeps more, the pipe takes the others."""
_ALIGNMENT_BYTES = 64

_log = logging.getLogger("stoker")


class SharedBatch(dict[str, Any]):
    """A batch in a worker process. Sent to the training process, it is a plain dictionary of tensors in shared memory.

    Other picklers and ``copy.deepcopy`` make a plain dictionary of copies.

    Args:
        columns: column name → tensor, ragged column or any other value.
        buffers: buffers of this process.
    """

    def __init__(self, columns: Mapping[str, Any], buffers: SharedBuffers) -> None:
        super().__init__(columns)
        self.buffers = buffers

    def __copy__(self) -> SharedBatch:
        """Return a copy that is sent in the same way; torch's ``default_convert`` copies each batch."""
        return SharedBatch(self, self.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make a plain dictionary."""
        return dict, (dict(self),)


class _BufferReference(NamedTuple):
    """A lent buffer, as it is sent.

    Attributes:
        owner: process number of the worker, and a random number.
        number: number of the buffer in the worker.
        size_bytes: size of the buffer with its last byte, which is not 0 while the buffer is lent.
        fd: file descriptor the first time, then None.
    """

    owner: tuple[int, int]
    number: int
    size_bytes: int
    fd: DupFd | None


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer of this process.

    Attributes:
        number: number of the buffer in this process.
        memory: memory of the buffer; the last byte is not 0 while it is lent.
        fd: file descriptor, until it has been sent.
    """

    number: int
    memory: NDArray[np.uint8]
    fd: DupFd | None

    def is_free(self) -> bool:
        """Return whether no process refers to the memory."""
        return sys.getrefcount(self.memory) <= FREE_ARRAY_REFERENCES and not self.memory[-1]


class SharedBuffers(BatchArrays):
    """The buffers of a worker process. One thread gathers large columns into them, another one sends them."""

    def __init__(self) -> None:
        super().__init__(reused=0)
        self._owner = os.getpid(), secrets.randbits(64)
        self._buffers: dict[int, _Buffer] = {}  # by address
        self._most = _MAX_BUFFERS
        self._lock = threading.Lock()

    def gather_rows(self, memory: memoryview, addresses: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
        """Return rows as :func:`stoker._fetch.gather.gather_rows` does; many bytes are in a buffer."""
        size_bytes = len(addresses) * row_bytes
        if size_bytes < _MIN_GATHERED_BYTES:
            return super().gather_rows(memory, addresses, row_bytes)
        return gather_rows_into(self.find_free(size_bytes), memory, addresses, row_bytes)

    def empty(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return an array, ``uint8 [size_bytes]``, with any content; a large one is a buffer."""
        return np.empty(size_bytes, np.uint8) if size_bytes < _MIN_GATHERED_BYTES else self.find_free(size_bytes)

    def find_free(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return the beginning of a free buffer; a new array if there is none, which is sent through the pipe."""
        with self._lock:
            free = [buffer for buffer in self._buffers.values() if len(buffer.memory) > size_bytes and buffer.is_free()]
            if free:
                return min(free, key=lambda buffer: len(buffer.memory)).memory[:size_bytes]
            if len(self._buffers) < self._most:
                try:
                    return self._add(size_bytes).memory[:size_bytes]
                except OSError as error:  # of a thread of torch's queue, which would lose the batch
                    self._most = len(self._buffers)
                    _log.warning(
                        "worker process %d got no shared memory after %d buffers: %s. Batches that find no free one "
                        "are sent through a pipe, which is slower; raise the limit of open files (ulimit -n)",
                        os.getpid(),
                        self._most,
                        error,
                    )
            return np.empty(size_bytes, np.uint8)

    def _add(self, size_bytes: int) -> _Buffer:
        fd = _shared_file()
        try:
            os.ftruncate(fd, (1 << size_bytes.bit_length()) + 1)  # pages are allocated at the first write
            memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
            buffer = _Buffer(len(self._buffers), memory, DupFd(fd))
        finally:
            os.close(fd)
        self._buffers[memory.ctypes.data] = buffer
        return buffer

    def lend(self, array: NDArray[np.uint8]) -> _BufferReference | None:
        """Lend the buffer that begins with this array; None if none does, or if it has been lent already."""
        buffer = self._buffers.get(array.ctypes.data)
        if buffer is None or buffer.memory[-1]:
            return None
        buffer.memory[-1] = 1
        fd, buffer.fd = buffer.fd, None
        return _BufferReference(self._owner, buffer.number, len(buffer.memory), fd)


def _shared_file() -> int:
    """Return the file descriptor of a file without a name, in memory if the system can do it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stoker-batch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _SentTensor(NamedTuple):
    """A tensor of a batch, as it is sent: the number of its memory, its first byte there, dtype and shape."""

    memory: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _send(batch: SharedBatch) -> tuple[Any, ...]:
    """Return how the training process makes the batch; tensors that are in no buffer are copied now."""
    sent: list[bytearray | _BufferReference] = [bytearray()]
    copied: list[tuple[int, NDArray[np.uint8]]] = []
    size_bytes = 0

    def place(value: Any) -> Any:
        nonlocal size_bytes
        if not isinstance(value, torch.Tensor) or not _is_plain(value):
            return value
        data = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        reference = batch.buffers.lend(data)
        if reference is not None:
            sent.append(reference)
            return _SentTensor(len(sent) - 1, 0, value.dtype, tuple(value.shape))
        start = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        copied.append((start, data))
        size_bytes = start + len(data)
        return _SentTensor(0, start, value.dtype, tuple(value.shape))

    columns = _map_values(place, batch)
    is_small = size_bytes < _MIN_SHARED_BYTES
    target = np.empty(size_bytes, np.uint8) if is_small else batch.buffers.find_free(size_bytes)
    for start, data in copied:
        target[start : start + len(data)] = data
    sent[0] = batch.buffers.lend(target) or bytearray(target)
    return _receive, (columns, sent)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of its bytes, dtype and shape."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return not tensor.requires_grad and not tensor.is_quantized


ForkingPickler.register(SharedBatch, _send)

_mappings: dict[tuple[int, int], dict[int, mmap.mmap]] = {}
"""Buffers of worker processes that this process has mapped: owner → number → mapping."""


def _receive(columns: dict[str, Any], sent: list[bytearray | _BufferReference]) -> dict[str, Any]:
    """Return a batch that a worker has sent."""
    memories = [np.frombuffer(part, np.uint8) if isinstance(part, bytearray) else _map(part) for part in sent]

    def open_tensor(value: Any) -> Any:
        if not isinstance(value, _SentTensor):
            return value
        end = value.start + math.prod(value.shape) * value.dtype.itemsize
        data = torch.from_numpy(memories[value.memory][value.start : end])
        return data.view(value.dtype).reshape(value.shape)

    return _map_values(open_tensor, columns)


def _map(reference: _BufferReference) -> NDArray[np.uint8]:
    """Return the memory of a lent buffer, which is free when no view of the array is left.

    Raises:
        StokerError: the worker has ended, and left a batch that was not received.
    """
    if reference.owner not in _mappings:
        forget_ended_workers()
    buffers = _mappings.setdefault(reference.owner, {})
    if reference.fd is not None:
        try:
            fd = reference.fd.detach()
        except (ConnectionError, FileNotFoundError, EOFError) as error:  # nobody listens any more
            raise _worker_ended(reference) from error
        try:
            buffers[reference.number] = mmap.mmap(fd, reference.size_bytes)
        finally:
            os.close(fd)
    mapping = buffers.get(reference.number)
    if mapping is None:
        raise _worker_ended(reference)
    memory = np.frombuffer(mapping, np.uint8)
    weakref.finalize(memory, _give_back, mapping, os.getpid()).atexit = False
    return memory


def _worker_ended(reference: _BufferReference) -> StokerError:
    return StokerError(f"the worker process {reference.owner[0]} ended before its batch was received")


def _give_back(mapping: mmap.mmap, pid: int) -> None:
    if pid == os.getpid():  # a forked process has copies of the batches of this one
        mapping[-1] = 0
        forget_ended_workers()


def forget_ended_workers() -> None:
    """Drop the buffers of workers that have ended; batches in them stay valid."""
    for owner in list(_mappings):
        try:
            os.kill(owner[0], 0)
        except ProcessLookupError:
            _mappings.pop(owner, None)


def _map_values(function: Callable[[Any], Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with a function applied to each value, or to both tensors of a ragged column."""
    return {
        name: RaggedColumn(value.column, function(value.values), function(value.offsets))
        if isinstance(value, RaggedColumn)
        else function(value)
        for name, value in columns.items()
    }
