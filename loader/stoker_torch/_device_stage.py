"""Batches of any iterable on a device, copied ahead of the training loop."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from stoker._base.closeable import Closeable
from stoker.errors import ConfigError, StateError
from stoker_torch._devices import check_available, open_device, parse_device
from stoker_torch._options import validate_integer
from stoker_torch._staging import StagedIteration, Staging

_log = logging.getLogger("stoker")


class DeviceStage(Closeable):
    """Iterates over the batches of an iterable, such as a ``DataLoader``, on a device.

    While a batch trains, a thread takes the next ones, copies them into page-locked memory if they are not there, and
    from there to the device, on a stream of its own. The training loop's current stream waits for a batch; the loop
    does not, unless it comes back at once: then its thread takes the batch itself. Tensors and :class:`RaggedColumn`
    are copied where they are in dictionaries, lists and tuples; other values stay as they are. A batch belongs to the
    loop, which may keep it.

    It replaces ``pin_memory=True`` and ``batch.to(device, non_blocking=True)``. A :class:`Loader` has the arguments
    ``device``, ``ahead`` and ``static`` itself, and then gathers into page-locked memory directly.

    A new iteration ends the one before it. An error of the iterable is raised in place of its batch.

    Args:
        batches: iterable to take batches from, by one thread at a time.
        device: device of torch; ``"cuda"`` is the current one at the first iteration. With ``"cpu"`` batches are those
            of the iterable, taken in the loop's thread.
        ahead: number of batches on the device ahead of the loop.
        static: whether to yield all batches in the tensors of the first one, which a CUDA graph reads again; all need
            the same shapes.
        batch_transform: function of a batch on the device, run on the stream of the copies; default none.

    Raises:
        ConfigError: an argument is wrong, or this machine has no such device.

    Example:
        >>> import torch
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> for batch in DeviceStage(torch.utils.data.DataLoader(images, batch_size=64), device):
        ...     train_step(*batch)
    """

    def __init__(
        self,
        batches: Iterable[Any],
        device: str | int | torch.device,
        *,
        ahead: int = 2,
        static: bool = False,
        batch_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if batch_transform is not None and not callable(batch_transform):
            raise ConfigError(f"batch_transform must be a function, not {batch_transform!r}")
        self.batches = batches
        self.device = parse_device(device)
        self._function = batch_transform
        self._staging: Staging | None = None
        self._iteration: weakref.ref[_DeviceIteration] | None = None
        ahead = validate_integer("ahead", ahead, 1)
        if self.device.type == "cpu":
            return
        check_available(self.device)
        self._staging = Staging(partial(open_device, self.device), ahead=ahead, is_static=static)
        weakref.finalize(self, self._staging.close)

    def __repr__(self) -> str:
        return f"<DeviceStage {self.device}: {self.batches!r:.200}>"

    def __len__(self) -> int:
        """Return the number of batches of the iterable.

        Raises:
            TypeError: the iterable has no length.
        """
        return len(self.batches)  # type: ignore[arg-type]  # raises what the docstring says

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration of the iterable; the one before it ends.

        Raises:
            StokerError: this process was forked from one that has copied to the device.
        """
        if self._staging is None:
            return iter(self.batches) if self._function is None else map(self._function, self.batches)
        self._end_iteration()
        batches, find_state = iter(self.batches), getattr(self.batches, "state_dict", None)
        state = None
        try:
            state = None if find_state is None else find_state()
        except AttributeError as error:  # Accelerate's loaders have the method also where they have no state
            _log.debug("%s has no state: %s", type(self.batches).__name__, error)
            find_state = None
        transform = None if self._function is None else partial(_apply, self._function)
        iteration = _DeviceIteration(self._staging.iterate(partial(_take_next, batches, find_state), transform), state)
        self._iteration = weakref.ref(iteration)
        return iteration

    def _end_iteration(self) -> None:
        iteration = None if self._iteration is None else self._iteration()
        if iteration is not None:
            iteration.end()
        self._iteration = None

    def state_dict(self) -> dict[str, Any]:
        """Return the iterable's state after the batch that was yielded last, although batches are taken ahead.

        Raises:
            StateError: the iterable has no ``state_dict``.
        """
        find = getattr(self.batches, "state_dict", None)
        if find is None:
            raise StateError(f"{type(self.batches).__name__} has no state_dict()")
        iteration = None if self._iteration is None else self._iteration()
        state: dict[str, Any] = find() if iteration is None or iteration.state is None else iteration.state
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue at a state; the current one ends.

        Raises:
            StateError: the iterable has no ``load_state_dict``.
        """
        load = getattr(self.batches, "load_state_dict", None)
        if load is None:
            raise StateError(f"{type(self.batches).__name__} has no load_state_dict()")
        self.close()
        load(state)

    def close(self) -> None:
        """End the iteration and its thread, and release the page-locked memory. A new iteration starts them again."""
        self._end_iteration()
        if self._staging is not None:
            self._staging.close()


def _apply(function: Callable[[Any], Any], _: object, batch: Any) -> Any:
    return function(batch)


class _Taken(NamedTuple):
    """The state of the iterable after a batch, and the error in place of the batch, if it failed."""

    state: Any
    error: Exception | None = None


def _take_next(batches: Iterator[Any], find_state: Callable[[], Any] | None) -> tuple[_Taken, Any] | None:
    try:
        batch = next(batches)
    except StopIteration:
        return None
    except Exception as error:  # noqa: BLE001 - raised in the loop, which may request the next batch
        return _Taken(None, error), None
    return _Taken(None if find_state is None else find_state()), batch


class _DeviceIteration:
    """One iteration of a :class:`DeviceStage`.

    Args:
        staged: batches on the device, with the state of the iterable after each one.
        state: state before the first one.

    Attributes:
        state: state after the batch that was yielded last; None after the last one, when the iterable itself has it.
    """

    def __init__(self, staged: StagedIteration[Any], state: Any) -> None:
        self._staged = staged
        self.state = state

    def __iter__(self) -> _DeviceIteration:
        return self

    def __next__(self) -> Any:
        taken = self._staged.next()
        if taken is None:
            self.state = None
            raise StopIteration
        (state, error), batch = taken
        if error is not None:
            raise error
        self.state = state
        return batch

    def end(self) -> None:
        """End the iteration."""
        self._staged.readahead.end()
