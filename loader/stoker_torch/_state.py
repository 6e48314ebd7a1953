"""State of a run: plain values from which any world size, batch size and number of workers can resume.

A loader's state is one position; that of a stream data set is a position per lane.

The state is saved when the platform reclaims the machine. Its processes then get SIGTERM, and SIGKILL after the grace
time:

- Google Cloud Run, services and jobs: 10 s.
- Kubernetes: ``terminationGracePeriodSeconds``, 30 s unless set; less where a spot node itself has less.
- Amazon ECS and Fargate: ``stopTimeout``, 30 s unless set; docker stop: 10 s.
- AWS Lambda: 0.3 s, and the signal is sent only where an external extension is registered (Python 3.12 and newer).
- EC2 and Compute Engine send processes no signal: a notice agent or the container runtime has to.
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

from stoker._base.arguments import explain_arguments
from stoker._base.closeable import Closeable
from stoker._format.manifest import Manifest
from stoker._order.sticky import MAX_STICKY
from stoker.errors import ConfigError, StateError
from stoker_torch._config import StreamConfig

_FORMAT = 1
_MINIMA = {"seed": 0, "version": 1, "window": 1, "lanes": 1, "limit": 1, "unit": 1}
_OPTIONAL = ("limit", "unit")
_DEFAULTS = {"unit": None, "sticky": 0.0}
"""Values that states do not contain, since earlier releases do not read them."""
_EQUIVALENT_SHUFFLES = {"full", "materialized"}
"""Shuffles with the same sequence, so that a state of one can be loaded by the other."""
_INTEGER_END = 1 << 64  # numbers of the order are counted in words of 64 bits


def read_integer(state: Mapping[str, Any], name: str, minimum: int = 0) -> int:
    """Return an integer of a state.

    Raises:
        StateError: the value is not an integer, or less than ``minimum``.
        KeyError: the state has no such name.
    """
    number = state[name]
    if type(number) is not int or not minimum <= number < _INTEGER_END:
        raise StateError(f"the state's {name} must be an integer of at least {minimum}, not {shown(number)}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """The values that fix the order of every epoch.

    Attributes:
        dataset: id of the data set.
        version: version of the manifest.
        seed: seed of the order.
        shuffle: name of the shuffle.
        window: super-samples, or units, mixed at a time, per lane.
        lanes: number of parts that the order is cut into.
        limit: number of samples delivered per epoch, None for all.
        unit: size of a unit in bytes, None if whole super-samples are mixed.
        sticky: probability that a super-sample stays in its lane of the epoch before.
    """

    dataset: str
    version: int
    seed: int
    shuffle: str
    window: int
    lanes: int
    limit: int | None
    unit: int | None = None
    sticky: float = 0.0
    _OWNER: ClassVar[str]
    _COMPARED_SETTINGS: ClassVar[Sequence[str]] = ("drop_last", "evaluation", "epochs", "batch_size")

    @classmethod
    def of_config(cls, config: StreamConfig, manifest: Manifest, lanes: int, **position: Any) -> Self:
        """Return a state with a loader's settings.

        Args:
            config: settings of the loader.
            manifest: pinned manifest, which has the data set's id and the version.
            lanes: number of lanes in use.
            **position: attributes of the subclass: the position.
        """
        fixed = {name: getattr(config, name) for name in ("seed", "shuffle", "window", "limit", "sticky")}
        fixed["unit"] = config.order(lanes=1).unit_bytes
        return cls(dataset=manifest.dataset, version=manifest.version, lanes=lanes, **fixed, **position)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the state that ``to_dict`` wrote.

        Raises:
            StateError: ``state`` is not such a state.
        """
        try:
            source = _parse_source(state)
            return cls(**cls._parse_position(state, source["lanes"]), **source)
        except StateError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            detail = f"{type(error).__name__}: {str(error)[:200]}"
            raise StateError(
                f"this is not the state of a {cls._OWNER} ({detail}); give the result of its state_dict()"
            ) from None

    @staticmethod
    def _parse_position(state: Mapping[str, Any], lanes: int) -> dict[str, Any]:
        """Return the position in a state, as attributes; errors of missing and invalid values are the caller's."""
        raise NotImplementedError

    def comparison_values(self, config: StreamConfig) -> dict[str, Any]:
        """Return the values that must be equal on all ranks, in the order in which they are compared."""
        values = asdict(self) | {name: getattr(config, name) for name in self._COMPARED_SETTINGS}
        unit, sticky = values.pop("unit"), values.pop("sticky")  # ranks exchange as many values as earlier releases
        if unit is not None:
            values["window"] = f"{self.window} units of {unit} bytes"
        elif sticky:
            values["window"] = f"{self.window}, sticky {sticky}"
        return values

    def source_dict(self, **rest: Any) -> dict[str, Any]:
        """Return the state as plain values, with ``rest``; ``sources`` has room for more than one data set."""
        values = _source_values(self)
        for name, default in _DEFAULTS.items():
            if values[name] == default:
                del values[name]
        return {"format": _FORMAT, **rest, "sources": [values]}

    def check(self, current: SourceState, config: StreamConfig) -> None:
        """Check that this state can be loaded by a loader.

        Args:
            current: current state of the loader.
            config: settings of the loader.

        Raises:
            StateError: this state is of another data set or order.
        """
        for name in ("dataset", "seed", "shuffle", "unit", "sticky", "window", "limit"):
            saved, expected = getattr(self, name), getattr(current, name)
            if saved != expected and not (name == "shuffle" and {saved, expected} == _EQUIVALENT_SHUFFLES):
                raise StateError(
                    f"the state was taken with {name}={saved!r}, but this loader has {expected!r}; construct "
                    f"the loader with the same {name}"
                )
        for name in ("lanes", "version"):
            expected = getattr(config, name)
            if expected is not None and expected != getattr(self, name):
                raise StateError(
                    f"the state was taken with {name}={getattr(self, name)}, but this loader was constructed with "
                    f"{name}={expected}; leave {name} out, and the state sets it"
                )


def _source_values(source: SourceState) -> dict[str, Any]:
    """Return the values by name, without the deep copy that ``asdict`` makes."""
    return {each.name: getattr(source, each.name) for each in fields(SourceState)}


def _parse_source(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a state's only source.

    Raises:
        StateError: a value is out of range, or the state has another format.
        KeyError: a value is missing.
        TypeError: a value has a wrong type.
        ValueError: the number of sources is not one.
    """
    if type(state["format"]) is not int or state["format"] != _FORMAT:
        raise StateError(
            f"the state has format {shown(state['format'])}, but this release of stoker reads format {_FORMAT}"
        )
    (source,) = state["sources"]
    values = _source_values(SourceState(**source))
    for name, minimum in _MINIMA.items():
        if name not in _OPTIONAL or values[name] is not None:
            read_integer(values, name, minimum)
    if type(values["sticky"]) not in (int, float) or not 0 <= values["sticky"] <= MAX_STICKY:
        raise StateError(f"the state's sticky must be a number from 0 to {MAX_STICKY}, not {shown(values['sticky'])}")
    for name in ("dataset", "shuffle"):
        if not isinstance(values[name], str):
            raise StateError(f"the state's {name} {shown(values[name])} is not text")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(SourceState):
    """The state of a :class:`~stoker_torch.Loader`: a position, and the values that fix the order.

    Attributes:
        epoch: number of the epoch, from 0.
        position: number of samples of the epoch that all ranks together have delivered.
    """

    epoch: int
    position: int
    _OWNER = "Loader"
    _COMPARED_SETTINGS = ("batch_size", "drop_last", "evaluation", "epochs")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON or ``torch.save``."""
        return self.source_dict(epoch=self.epoch, position=self.position)

    @staticmethod
    def _parse_position(state: Mapping[str, Any], lanes: int) -> dict[str, Any]:
        return {name: read_integer(state, name) for name in ("epoch", "position")}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState(SourceState):
    """The state of a :class:`~stoker_torch.StreamDataset`: a position per lane, and the values that fix the order.

    Attributes:
        epoch: number of the epoch, from 0.
        delivered: lane → number of its samples that were delivered; only the lanes of the worker or process that took
            the state.
        repeated: number of samples that these lanes delivered twice.
        is_complete: whether the worker or process that took the state has delivered its share of the epoch.
    """

    epoch: int
    delivered: Mapping[int, int] = field(default_factory=dict)
    repeated: int = 0
    is_complete: bool = False
    _OWNER = "StreamDataset"

    def advance_epoch(self) -> StreamState:
        """Return the start of the next epoch if all lanes have come to the end of this one; else this state."""
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
    def _parse_position(state: Mapping[str, Any], lanes: int) -> dict[str, Any]:
        delivered = {int(lane): read_integer(state["lanes"], lane) for lane, _ in state["lanes"].items()}
        unknown = [lane for lane in delivered if not 0 <= lane < lanes]
        if unknown or not delivered:
            raise StateError(f"the state's lanes {unknown or '{}'} are not among {lanes}")
        counts = {name: read_integer(state, name) for name in ("epoch", "repeated")}
        return {**counts, "delivered": delivered, "is_complete": state.get("complete") is True}


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states that the workers or ranks of one run took at one time into one state.

    A :class:`~stoker_torch.StreamDataset` that loads it before the first iteration of its DataLoader resumes with any
    number of workers and ranks that divides the number of lanes. The remaining samples are delivered once; if they do
    not divide evenly among the new ranks, the ranks with fewer repeat their last sample. If all workers have come to
    the end of an epoch, the merged state is the start of the next one, as in a :class:`~stoker_torch.Loader`.

    Args:
        states: states of stream data sets, or of torchdata's ``StatefulDataLoader``, which contain them.

    Raises:
        StateError: there is no state, or the states are not of one run and time.

    Example:
        >>> ranks = [StreamDataset("data", lanes=4, rank=rank, world_size=2) for rank in range(2)]
        >>> merged = merge_states(dataset.state_dict() for dataset in ranks)
        >>> dataset = StreamDataset("data", lanes=4)
        >>> dataset.load_state_dict(merged)  # one rank continues
    """
    parsed = [StreamState.from_dict(each) for state in states for each in _find_states(state)]
    if not parsed:
        raise StateError("there is no state of a StreamDataset to merge; give the state_dict() of each worker or rank")
    bare = [replace(state, delivered={}, repeated=0, is_complete=False) for state in parsed]
    if any(each != bare[0] for each in bare):
        raise StateError("the states are of different epochs or runs, and cannot be merged; take all at one time")
    delivered: dict[int, int] = {}
    for lane, places in (each for state in parsed for each in state.delivered.items()):
        if delivered.setdefault(lane, places) != places:
            raise StateError(
                f"lane {lane} is at position {delivered[lane]} in one state and at {places} in another; merge states "
                "that were taken at one time"
            )
    is_complete = all(state.is_complete for state in parsed)
    merged = replace(bare[0], delivered=dict(sorted(delivered.items())), is_complete=is_complete)
    return merged.advance_epoch().to_dict()


def _find_states(state: object) -> Iterator[Mapping[str, Any]]:
    """Yield the states of stream data sets that a nested state contains."""
    if not isinstance(state, Mapping):
        return
    if "sources" in state and "lanes" in state:
        yield state
        return
    if state.get("_steps_since_snapshot"):
        raise StateError("a StatefulDataLoader's state can be merged only with snapshot_every_n_steps=1")
    for each in state.values():
        yield from _find_states(each)


class Stateful(Protocol):
    """An object with a state that can be saved, such as a loader."""

    def state_dict(self) -> Any:
        """Return the position after the last batch yielded; must not take a lock that the caller may hold."""
        ...


def save_on_sigterm(
    loader: Stateful,
    callback: Callable[[Any], object],
    *,
    signals: Iterable[int] = (signal.SIGTERM,),
    grace_seconds: float = 10.0,
    wait_seconds: float = 0.0,
) -> Preemption:
    """Call ``callback(loader.state_dict())`` once, when one of ``signals`` arrives.

    The callback runs in the main thread, between two of its instructions. By default it runs at once, so the last batch
    yielded may not have reached the model yet. To save a model that matches the position, let training finish its step:
    call :meth:`Preemption.checkpoint` after each step and set ``wait_seconds``. If no checkpoint comes within that time
    (for example, while training waits for data), or a second signal arrives, the state is saved at its current
    position. Signals that arrive while the callback runs are ignored.

    Under torch.distributed all ranks have to leave at the same step, or some would wait for a rank that has ended. Add
    :attr:`Preemption.is_requested` to a value that each step reduces over all ranks; if the sum is not zero, all ranks
    save and leave, whichever of them got the signal.

    Afterwards the previous handler gets the signal; the default handler ends the process. An exception from the
    callback goes up through the training loop instead, so ``raise SystemExit`` unwinds it in order. A forked child only
    passes signals on, since worker processes are commonly ended with SIGTERM.

    Args:
        loader: loader whose position is saved.
        callback: function of the state; its return value is ignored.
        signals: signals that announce the end of the machine.
        grace_seconds: time from the signal to SIGKILL on this platform; :attr:`Preemption.remaining_seconds` counts it
            down.
        wait_seconds: part of the grace time that training may use to reach a checkpoint.

    Returns:
        The active hook: a context manager, ended by its exit or by :meth:`Preemption.close`.

    Raises:
        ConfigError: this is not the main thread, the only one where Python handles signals; or a value is out of range.

    Example:
        >>> import torch
        >>> loader = Loader("data", batch_size=64)
        >>> with save_on_sigterm(loader, lambda state: torch.save(state, "state.pt"), wait_seconds=5) as preemption:
        ...     for batch in loader:
        ...         train_step(batch["image"], batch["label"])
        ...         preemption.checkpoint()
        >>> loader.close()
    """
    if not 0 <= wait_seconds < grace_seconds:
        raise ConfigError(
            f"wait_seconds must be in [0, grace_seconds={grace_seconds}), not {wait_seconds}, to leave time for the "
            "callback"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("Python handles signals in the main thread only: call save_on_sigterm there")
    return Preemption(lambda: callback(loader.state_dict()), tuple(signals), grace_seconds, wait_seconds)


@explain_arguments("Preemption", renamed={"grace": "grace_seconds", "wait": "wait_seconds"})
class Preemption(Closeable):
    """The active hook of :func:`save_on_sigterm`, which constructs it.

    Example:
        >>> import torch
        >>> loader = Loader("data", batch_size=64)
        >>> preemption = save_on_sigterm(loader, lambda state: torch.save(state, "state.pt"), wait_seconds=5)
        >>> preemption.is_requested
        False
        >>> preemption.close()
        >>> loader.close()
    """

    def __init__(
        self, save: Callable[[], object], signals: tuple[int, ...], grace_seconds: float, wait_seconds: float
    ) -> None:
        self._save = save
        self._grace_seconds, self._wait_seconds = grace_seconds, wait_seconds
        self._pid, self._main_thread = os.getpid(), threading.get_ident()
        self._signal: int | None = None  # the first one that arrived
        self._arrived_at = 0.0
        self._is_over = False
        # A handler may interrupt any line below, so these are locks for their atomic acquire.
        self._save_lock = _thread.allocate_lock()  # acquired by the only call that saves the state
        self._unsaved_lock = _thread.allocate_lock()  # held until then; the reminder thread waits for it
        self._unsaved_lock.acquire()
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
                raise ConfigError(
                    f"signal {number} has a handler that was not installed by Python and could not be restored; remove "
                    "it, or leave the signal out of signals="
                )
            self._previous[number] = signal.signal(number, self._handle)
        except (ValueError, OSError) as error:
            raise ConfigError(f"signal {number} cannot be handled: {error}") from None

    @property
    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._signal is not None

    @property
    def remaining_seconds(self) -> float:
        """Seconds that are left of the grace time; before a signal, the whole grace time."""
        if not self.is_requested:
            return self._grace_seconds
        return max(0.0, self._arrived_at + self._grace_seconds - time.monotonic())

    def checkpoint(self) -> None:
        """Mark a point where model and position match; if a signal has arrived, save the state."""
        if self._signal is not None and not self._is_over and os.getpid() == self._pid:
            self._save_once(self._signal, None)

    def close(self) -> None:
        """Restore the previous handlers, except if this one was replaced in the meantime. Idempotent."""
        self._is_over = True
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._release_pending()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or os.getpid() != self._pid:
            self._pass_on(number, frame)
            return
        is_first = self._signal is None
        if is_first:
            self._signal, self._arrived_at = number, time.monotonic()
        if is_first and self._wait_seconds:
            # threading.Thread takes locks that the interrupted main thread may hold; start_new_thread takes none.
            _thread.start_new_thread(self._resend_signal, (number,))
        else:
            self._save_once(number, frame)

    def _resend_signal(self, number: int) -> None:
        """Send the signal again, from a separate thread, unless the state is saved in time."""
        if not self._unsaved_lock.acquire(timeout=self._wait_seconds):
            signal.pthread_kill(self._main_thread, number)

    def _save_once(self, number: int, frame: FrameType | None) -> None:
        if not self._save_lock.acquire(blocking=False):
            return
        self._release_pending()
        try:
            self._save()
        finally:
            self._is_over = True
        self._pass_on(number, frame)

    def _release_pending(self) -> None:
        with contextlib.suppress(RuntimeError):  # released already
            self._unsaved_lock.release()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number, signal.SIG_DFL)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # Still alive: the kernel does not end a container's first process, and ignores some signals by default.
            raise SystemExit(128 + number)
