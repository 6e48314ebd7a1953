"""Saves the loader's position when the platform takes the machine away.

Before a machine is reclaimed its processes get SIGTERM, and SIGKILL once the grace time is over:

- Google Cloud Run, services and jobs: 10 s.
- Kubernetes: ``terminationGracePeriodSeconds``, 30 s unless set; less where a spot node itself has less.
- Amazon ECS and Fargate: ``stopTimeout``, 30 s unless set; docker stop: 10 s.
- AWS Lambda: 0.3 s, and the signal is sent only where an external extension is registered (Python 3.12 and newer).
- EC2 and Compute Engine send none to a process: a notice agent or the container runtime has to.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Protocol

from stoker.errors import ConfigError

__all__ = ["Preemption", "Stateful", "save_on_sigterm"]


class Stateful(Protocol):
    """Anything with a position, such as a loader."""

    def state_dict(self) -> Any:
        """Return the position after the last batch that was yielded; takes no lock that the caller may hold."""
        ...


def save_on_sigterm(
    loader: Stateful,
    callback: Callable[[Any], object],
    *,
    signals: Iterable[int] = (signal.SIGTERM,),
    grace_seconds: float = 10.0,
    wait_seconds: float = 0.0,
) -> Preemption:
    """Hand ``loader.state_dict()`` to ``callback``, once, when one of ``signals`` arrives.

    The callback runs in the main thread, between two of its instructions. By default that is at once, so the last
    batch yielded may not have reached the model yet. To save a model that agrees with the position, let training go on
    to the end of its step: call :meth:`Preemption.checkpoint` after each step and give ``wait_seconds``. If no
    checkpoint comes within that time (training waits for data, say), or a second signal does, the state is handed over
    where it is. Signals that come while the callback runs are ignored.

    Under torch.distributed all ranks have to leave at the same step, or some would wait for one that is gone. So let
    each add :attr:`Preemption.is_requested` to something that a step reduces over all ranks anyway; where the sum is
    not zero all save and leave, whichever of them got the signal.

    Then the signal goes on to the handler that was there before; if that is the default, it ends the process. An
    exception from the callback goes up through the training loop instead, so ``raise SystemExit`` unwinds it in order.
    A forked child only passes signals on: worker processes are ended with SIGTERM every day.

    Args:
        loader: whose position to save.
        callback: gets the state; its return value is ignored.
        signals: which signals mean that the end is near.
        grace_seconds: from the signal to SIGKILL on this platform; :attr:`Preemption.remaining_seconds` counts it down.
        wait_seconds: how much of it training may use to come to a checkpoint.

    Returns:
        The active hook: a context manager, ended by its exit or by :meth:`Preemption.close`.

    Raises:
        ConfigError: this is not the main thread, where alone Python can handle signals; or a value is out of range.
    """
    if not 0 <= wait_seconds < grace_seconds:
        raise ConfigError(f"wait_seconds {wait_seconds} is not in [0, grace_seconds = {grace_seconds})")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("signals can be watched from the main thread only; call save_on_sigterm there")
    return Preemption(lambda: callback(loader.state_dict()), tuple(signals), grace_seconds, wait_seconds)


class Preemption:
    """An active hook; made by :func:`save_on_sigterm`."""

    def __init__(self, save: Callable[[], object], signals: tuple[int, ...], grace: float, wait: float) -> None:
        self._save = save
        self._grace_seconds, self._wait_seconds = grace, wait
        self._process, self._main_thread = os.getpid(), threading.get_ident()
        self._signal: int | None = None  # the one that arrived first
        self._arrived_at = 0.0
        self._is_over = False
        # A handler may interrupt any line below, so these are locks for their atomic acquire.
        self._claim = _thread.allocate_lock()  # taken by the one call that hands the state over
        self._pending = _thread.allocate_lock()  # held until then; the reminder waits for it
        self._pending.acquire()
        self._previous: dict[int, Any] = {}
        try:
            for number in signals:
                self._install(number)
        except BaseException:
            self.close()
            raise

    def _install(self, number: int) -> None:
        try:
            if signal.getsignal(number) is None:
                raise ConfigError(f"signal {number} has a handler that is not Python's and could not be put back")
            self._previous[number] = signal.signal(number, self._handle)
        except (ValueError, OSError) as error:
            raise ConfigError(f"signal {number} cannot be watched: {error}") from None

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_requested(self) -> bool:
        """True once a signal has arrived."""
        return self._signal is not None

    @property
    def remaining_seconds(self) -> float:
        """What is left of the grace time, all of it before the signal."""
        if not self.is_requested:
            return self._grace_seconds
        return max(0.0, self._arrived_at + self._grace_seconds - time.monotonic())

    def checkpoint(self) -> None:
        """Say that model and position agree now: where a signal has arrived, this hands the state over."""
        if self._signal is not None and not self._is_over and os.getpid() == self._process:
            self._hand_over(self._signal, None)

    def close(self) -> None:
        """Put back the previous handlers, except where somebody has replaced this one since. Idempotent."""
        self._is_over = True
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._settle()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or os.getpid() != self._process:
            self._pass_on(number, frame)
            return
        is_first = self._signal is None
        if is_first:
            self._signal, self._arrived_at = number, time.monotonic()
        if is_first and self._wait_seconds:
            # threading.Thread takes locks that the interrupted main thread may hold; the bare call takes none.
            _thread.start_new_thread(self._remind, (number,))
        else:
            self._hand_over(number, frame)

    def _remind(self, number: int) -> None:
        """Deliver the signal again, from a thread of its own, unless the state is handed over in time."""
        if not self._pending.acquire(timeout=self._wait_seconds):
            signal.pthread_kill(self._main_thread, number)

    def _hand_over(self, number: int, frame: FrameType | None) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self._settle()
        try:
            self._save()
        finally:
            self._is_over = True
        self._pass_on(number, frame)

    def _settle(self) -> None:
        with contextlib.suppress(RuntimeError):  # released already
            self._pending.release()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number, signal.SIG_DFL)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # Still here: the kernel spares a container's first process, and some signals do no harm by default.
            raise SystemExit(128 + number)
