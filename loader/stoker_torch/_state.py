"""Where a run is: plain values that any world size, batch size and number of workers can go on from.

A loader's state is a position; that of a stream data set says how far each lane has come.

It is saved when the platform takes the machine away. Before a machine is reclaimed its processes get SIGTERM, and
SIGKILL once the grace time is over:

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from reprlib import repr as shown
from types import FrameType
from typing import Any, ClassVar, Protocol, Self

from stoker._base.closing import Closing
from stoker._format.manifest import Manifest
from stoker.errors import ConfigError, StateError
from stoker_torch._config import StreamConfig

_FORMAT = 1
_LEAST = {"seed": 0, "version": 1, "window": 1, "lanes": 1, "limit": 1}
_SAME_SEQUENCE = {"full", "materialized"}
"""Shuffles of which a position is the same sample."""
_END = 1 << 64  # numbers of the order are counted in words of 64 bits


def checked_integer(state: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Return an integer of a state.

    Raises:
        StateError: it is none, or too small.
        KeyError: there is none of the name.
    """
    number = state[name]
    if type(number) is not int or not least <= number < _END:
        raise StateError(f"the state's {name} {shown(number)} is not an integer of at least {least}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """What fixes the order of every epoch.

    Attributes:
        dataset: id of the data set.
        version: of the manifest.
        seed: of the order.
        shuffle: of the order.
        window: of the order.
        lanes: of the order.
        limit: of every epoch, None if there is none.
    """

    dataset: str
    version: int
    seed: int
    shuffle: str
    window: int
    lanes: int
    limit: int | None
    _OWNER: ClassVar[str]
    _ALIKE: ClassVar[Sequence[str]] = ("drop_last", "evaluation", "epochs", "batch_size")

    @classmethod
    def of_config(cls, config: StreamConfig, manifest: Manifest, lanes: int, **place: Any) -> Self:
        """Return what a loader's settings fix, with what they leave to be found out, and the place of a state."""
        fixed = {name: getattr(config, name) for name in ("seed", "shuffle", "window", "limit")}
        return cls(dataset=manifest.dataset, version=manifest.version, lanes=lanes, **fixed, **place)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the state that ``to_dict`` gave.

        Raises:
            StateError: it is not one.
        """
        try:
            source = _source_of(state)
            return cls(**cls._place_of(state, source["lanes"]), **source)
        except StateError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            text = f"{type(error).__name__}: {str(error)[:200]}"
            raise StateError(f"this is not the state of a {cls._OWNER}: {text}") from None

    @staticmethod
    def _place_of(state: Mapping[str, Any], lanes: int) -> dict[str, Any]:
        """Return what a state says besides its source; may raise what missing and odd values do."""
        raise NotImplementedError

    def compared(self, config: StreamConfig) -> dict[str, Any]:
        """Return what all ranks must have alike, in the order in which they compare it."""
        return asdict(self) | {name: getattr(config, name) for name in self._ALIKE}

    def source_dict(self, **rest: Any) -> dict[str, Any]:
        """Return the state as plain values; ``sources`` has room for more than one data set."""
        return {"format": _FORMAT, **rest, "sources": [_values(self)]}

    def check(self, mine: SourceState, config: StreamConfig) -> None:
        """Check that this state can be loaded where ``config`` holds, and without it ``mine`` would.

        Raises:
            StateError: it is of another data set or order.
        """
        for name in ("dataset", "seed", "shuffle", "window", "limit"):
            found, wanted = getattr(self, name), getattr(mine, name)
            if found != wanted and not (name == "shuffle" and {found, wanted} == _SAME_SEQUENCE):
                raise StateError(
                    f"the state was taken with {name}={found!r}, this loader has {wanted!r}; construct it with the same"
                )
        for name in ("lanes", "version"):
            wanted = getattr(config, name)
            if wanted is not None and wanted != getattr(self, name):
                raise StateError(
                    f"the state was taken with {name}={getattr(self, name)}, this loader was given {wanted}; "
                    "leave it out"
                )


def _values(source: SourceState) -> dict[str, Any]:
    """Return the values as they are; ``asdict`` copies them, however deep."""
    return {each.name: getattr(source, each.name) for each in fields(SourceState)}


def _source_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a state's only source.

    Raises:
        StateError: a value is out of range, or the format is another.
        KeyError: something is missing.
        TypeError: something is of another type.
        ValueError: there is not one source.
    """
    if type(state["format"]) is not int or state["format"] != _FORMAT:
        raise StateError(f"state of format {shown(state['format'])}: this version of stoker reads {_FORMAT}")
    (source,) = state["sources"]
    values = _values(SourceState(**source))
    for name, least in _LEAST.items():
        if name != "limit" or values[name] is not None:
            checked_integer(values, name, least)
    for name in ("dataset", "shuffle"):
        if not isinstance(values[name], str):
            raise StateError(f"the state's {name} {shown(values[name])} is not text")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(SourceState):
    """A position and all that fixes the order behind it.

    Attributes:
        epoch: from 0.
        position: of the epoch, over all ranks: so many samples were delivered.
    """

    epoch: int
    position: int
    _OWNER = "Loader"
    _ALIKE = ("batch_size", "drop_last", "evaluation", "epochs")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON or ``torch.save``."""
        return self.source_dict(epoch=self.epoch, position=self.position)

    @staticmethod
    def _place_of(state: Mapping[str, Any], lanes: int) -> dict[str, Any]:
        return {name: checked_integer(state, name) for name in ("epoch", "position")}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState(SourceState):
    """How far lanes have come in an epoch, and all that fixes the order behind it.

    Attributes:
        epoch: from 0.
        delivered: lane → places of it that were delivered; only of lanes that whoever took the state has.
        repeated: how many samples they delivered a second time.
        is_complete: whether nothing of the epoch is left for whoever took the state.
    """

    epoch: int
    delivered: Mapping[int, int] = field(default_factory=dict)
    repeated: int = 0
    is_complete: bool = False
    _OWNER = "StreamDataset"

    def behind_end(self) -> StreamState:
        """Return the start of the next epoch, where all lanes have come to the end of this one; else this state."""
        if not self.is_complete or len(self.delivered) < self.lanes:
            return self
        return replace(
            self, epoch=self.epoch + 1, delivered=dict.fromkeys(self.delivered, 0), repeated=0, is_complete=False
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON or ``torch.save``."""
        delivered = {str(lane): places for lane, places in self.delivered.items()}
        rest = {"complete": True} if self.is_complete else {}
        return self.source_dict(epoch=self.epoch, repeated=self.repeated, lanes=delivered, **rest)

    @staticmethod
    def _place_of(state: Mapping[str, Any], lanes: int) -> dict[str, Any]:
        delivered = {int(lane): checked_integer(state["lanes"], lane) for lane, _ in state["lanes"].items()}
        unknown = [lane for lane in delivered if not 0 <= lane < lanes]
        if unknown or not delivered:
            raise StateError(f"the state's lanes {unknown or '{}'} are not among {lanes}")
        counts = {name: checked_integer(state, name) for name in ("epoch", "repeated")}
        return {**counts, "delivered": delivered, "is_complete": state.get("complete") is True}


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state of the states that the workers or ranks of one run took at one time.

    A :class:`~stoker_torch.StreamDataset` that loads it before its DataLoader is iterated over goes on with any number
    of workers and ranks that divides the lanes. The samples that are left are delivered once; where the new ranks have
    not equally many of them left, those with fewer repeat their last one to make up. Where all have come to the end of
    an epoch, the merged state is the start of the next one, as a :class:`~stoker_torch.Loader` says it.

    Args:
        states: of stream data sets, or of torchdata's ``StatefulDataLoader``, in which they are found.

    Raises:
        StateError: there is none, or they are not of one run and time.
    """
    found = [StreamState.from_dict(each) for state in states for each in _found(state)]
    if not found:
        raise StateError("there is no state of a StreamDataset to merge")
    bare = [replace(state, delivered={}, repeated=0, is_complete=False) for state in found]
    if any(each != bare[0] for each in bare):
        raise StateError("the states are of different epochs or runs, and cannot be merged")
    delivered: dict[int, int] = {}
    for lane, places in (each for state in found for each in state.delivered.items()):
        if delivered.setdefault(lane, places) != places:
            raise StateError(f"lane {lane} has come to {delivered[lane]} and to {places} in states to be merged")
    is_complete = all(state.is_complete for state in found)
    merged = replace(bare[0], delivered=dict(sorted(delivered.items())), is_complete=is_complete)
    return merged.behind_end().to_dict()


def _found(state: object) -> Iterator[Mapping[str, Any]]:
    """Yield the states of stream data sets in a state."""
    if not isinstance(state, Mapping):
        return
    if "sources" in state and "lanes" in state:
        yield state
        return
    if state.get("_steps_since_snapshot"):
        raise StateError("a StatefulDataLoader's state can be merged only with snapshot_every_n_steps=1")
    for each in state.values():
        yield from _found(each)


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


class Preemption(Closing):
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
