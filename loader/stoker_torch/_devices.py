"""Devices that batches are copied to: the streams, events and page-locked memory of an accelerator.

CUDA and Intel's XPU offer them under the same names in torch. A device without streams, such as Apple's MPS, copies
when it is told to, so its batches are complete before they are delivered.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from stoker.errors import ConfigError

_log = logging.getLogger("stoker")


class Stream(Protocol):
    """A queue of work on a device, as ``torch.cuda.Stream``."""

    def wait_event(self, event: Any) -> None:
        """Make work that is queued later wait for an event."""
        ...

    def record_event(self, event: Any) -> object:
        """Complete an event when the work that is queued so far is done."""
        ...


class Event(Protocol):
    """A point in the work of a stream, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        ...


class Device(Protocol):
    """What staging needs of a device. Streams are those of the calling thread unless they are named."""

    name: str

    def enter_thread(self) -> None:
        """Prepare the calling thread, which copies to the device in the background."""
        ...

    def create_stream(self) -> Stream:
        """Return a new stream."""
        ...

    def current_stream(self) -> Stream:
        """Return the current stream."""
        ...

    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the current one for the duration of a block."""
        ...

    def create_event(self, *, is_timed: bool = False) -> Event:
        """Return a new event."""
        ...

    def elapsed_seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two timed events that are complete."""
        ...

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Return page-locked memory that a copy can read while the host goes on, ``uint8 [size_bytes]``."""
        ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy of a tensor into new memory of the device, on the current stream."""
        ...

    def overwrite(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of a tensor of the device into another one, on the current stream."""
        ...

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a tensor, once it is freed, until the work queued on a stream by then is done."""
        ...

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph instead of working."""
        ...


class StreamDevice:
    """An accelerator whose streams torch offers: CUDA (also ROCm), and XPU.

    Args:
        device: device of torch, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device
        self._module: Any = getattr(torch, device.type)
        self._is_capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)

    def enter_thread(self) -> None:
        """Use one core for copies on the host, and let the thread work while another one captures a graph."""
        torch.set_num_threads(1)  # for this thread; as torch's own thread for page-locked memory does
        if self._device.type == "cuda":
            _permit_calls_during_captures()

    def create_stream(self) -> Stream:
        """Return a new stream that does not wait for the default stream."""
        stream: Stream = self._module.Stream(self._device)
        return stream

    def current_stream(self) -> Stream:
        """Return the current stream."""
        stream: Stream = self._module.current_stream(self._device)
        return stream

    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the current one for the duration of a block."""
        context: AbstractContextManager[object] = self._module.stream(stream)
        return context

    def create_event(self, *, is_timed: bool = False) -> Event:
        """Return a new event; on CUDA, a thread that waits for it sleeps."""
        options = {"blocking": True} if self._device.type == "cuda" else {}
        event: Event = self._module.Event(enable_timing=is_timed, **options)
        return event

    def elapsed_seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two timed events that are complete."""
        return float(begin.elapsed_time(end)) / 1e3

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Return page-locked memory of torch's allocator, ``uint8 [size_bytes]``."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy of a tensor into new memory of the device, on the current stream."""
        return tensor.to(self._device, non_blocking=True)

    def overwrite(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of a tensor of the device into another one, on the current stream."""
        target.copy_(source, non_blocking=True)

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a tensor, once it is freed, until the work queued on a stream by then is done."""
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph instead of working."""
        return self._is_capturing()


class _CompleteEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _OnlyStream:
    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any) -> None:
        pass


class BlockingDevice:
    """A device without streams: a copy is complete when the call returns.

    Args:
        device: device of torch.
    """

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device
        self._stream = _OnlyStream()

    def enter_thread(self) -> None:
        """Use one core for copies on the host."""
        torch.set_num_threads(1)

    def create_stream(self) -> Stream:
        """Return the only stream."""
        return self._stream

    def current_stream(self) -> Stream:
        """Return the only stream."""
        return self._stream

    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def create_event(self, *, is_timed: bool = False) -> Event:
        """Return an event that is complete."""
        return _CompleteEvent()

    def elapsed_seconds(self, begin: Any, end: Any) -> float:
        """Return 0: the device does not measure copies."""
        return 0.0

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Return memory of the host, ``uint8 [size_bytes]``."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device."""
        return tensor.to(self._device)

    def overwrite(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor of the device into another one."""
        target.copy_(source)

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do nothing: torch frees memory in the order of the device's work."""

    def is_capturing(self) -> bool:
        """Return False."""
        return False


def parse_device(device: object) -> torch.device:
    """Return a setting as a device of torch.

    Raises:
        ConfigError: torch does not know it.
    """
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(device if isinstance(device, str | int) and not isinstance(device, bool) else str(device))
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise ConfigError(f"device must be a device of torch, such as 'cuda:0', not {device!r}: {text}") from None


def check_available(device: torch.device) -> None:
    """Check that this machine has an accelerator, without a context on it.

    Raises:
        ConfigError: it has not.
    """
    kind = device.type
    module = getattr(torch, kind, None)
    if module is None or not hasattr(module, "is_available") or not module.is_available():
        raise ConfigError(
            f"device={str(device)!r}: torch {torch.__version__} finds no {kind} device on this machine; leave out "
            "device= for batches in host memory, or check torch's build and the driver"
        )
    count = module.device_count()
    if device.index is not None and device.index >= count:
        raise ConfigError(f"device={str(device)!r}: this machine has {count} of them, numbered from 0")


def open_device(device: torch.device) -> Device:
    """Return the accelerator that batches are copied to; without an index, the current one of its kind."""
    kind = device.type
    module = getattr(torch, kind)
    if not hasattr(module, "Stream") or not hasattr(module, "set_device"):
        return BlockingDevice(device)
    index: int | None = device.index
    if index is None:
        index = int(module.current_device())
        _check_choice(kind, index, module.device_count())
    return StreamDevice(torch.device(kind, index))


def _check_choice(kind: str, index: int, count: int) -> None:
    """Warn if all ranks of a machine are about to copy to its first device."""
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank.isdecimal() and index != int(rank) < count:
        _log.warning(
            "device=%r is %s:%d, the current device of this process, whose LOCAL_RANK is %s: call "
            "torch.%s.set_device(LOCAL_RANK) before the loop begins, or give device='%s:%s'",
            *(kind, kind, index, rank, kind, kind, rank),
        )


_CAPTURE_MODE_THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`` of the CUDA driver: only captures of the calling thread forbid calls."""


@cache
def _driver() -> Any:
    """Return the CUDA driver's library, or None."""
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError as error:
        _log.debug("the CUDA driver cannot be called: %s", error)
        return None


def _permit_calls_during_captures() -> None:
    """Let this thread allocate memory and query events while another thread captures a graph.

    ``torch.cuda.graph`` captures in CUDA's global mode, in which such a call of any thread makes the capture fail,
    unless that thread has chosen another mode for itself (CUDA driver API, cuThreadExchangeStreamCaptureMode).
    """
    exchange = getattr(_driver(), "cuThreadExchangeStreamCaptureMode", None)
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)))
