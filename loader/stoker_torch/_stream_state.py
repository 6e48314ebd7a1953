"""Where a stream data set is: how far each lane has come, so that any number of workers can go on from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from stoker.errors import StateError
from stoker_torch._state import SourceState, checked_integer

__all__ = ["StreamState", "merge_states"]


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

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the state that :meth:`to_dict` gave.

        Raises:
            StateError: it is not one.
        """
        try:
            epoch, repeated = checked_integer(state, "epoch"), checked_integer(state, "repeated")
            values = cls.values_of(state)
            delivered = {int(lane): checked_integer(state["lanes"], lane) for lane, _ in state["lanes"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"this is not the state of a StreamDataset: {type(error).__name__}: {error}") from None
        unknown = [lane for lane in delivered if not 0 <= lane < values["lanes"]]
        if unknown or not delivered:
            raise StateError(f"the state's lanes {unknown or '{}'} are not among {values['lanes']}")
        is_complete = state.get("complete") is True
        return cls(epoch=epoch, repeated=repeated, delivered=delivered, is_complete=is_complete, **values)


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
    delivered: dict[int, int] = {}
    for state in found:
        if replace(state, delivered={}, repeated=0, is_complete=False) != replace(
            found[0], delivered={}, repeated=0, is_complete=False
        ):
            raise StateError("the states are of different epochs or runs, and cannot be merged")
        for lane, places in state.delivered.items():
            if delivered.setdefault(lane, places) != places:
                raise StateError(f"lane {lane} has come to {delivered[lane]} and to {places} in states to be merged")
    is_complete = all(state.is_complete for state in found)
    merged = replace(found[0], delivered=dict(sorted(delivered.items())), repeated=0, is_complete=is_complete)
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
