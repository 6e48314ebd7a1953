"""Where a run is: plain values that any world size, batch size and number of workers can go on from.

A loader's state is a position; that of a stream data set says how far each lane has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from reprlib import repr as shown
from typing import Any, Self

from stoker.errors import StateError
from stoker_torch._config import StreamConfig

__all__ = ["RunState", "SourceState", "StreamState", "checked_integer", "merge_states"]

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

    @classmethod
    def of_config(cls, config: StreamConfig, *, dataset: str, version: int, lanes: int) -> SourceState:
        """Return what a loader's settings fix, with what they leave to be found out."""
        return SourceState(
            dataset=dataset,
            version=version,
            seed=config.seed,
            shuffle=config.shuffle,
            window=config.window,
            lanes=lanes,
            limit=config.limit,
        )

    @staticmethod
    def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(SourceState):
    """A position and all that fixes the order behind it.

    Attributes:
        epoch: from 0.
        position: of the epoch, over all ranks: so many samples were delivered.
    """

    epoch: int
    position: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON or ``torch.save``."""
        return self.source_dict(epoch=self.epoch, position=self.position)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the state that :meth:`to_dict` gave.

        Raises:
            StateError: it is not one.
        """
        try:
            epoch, position = checked_integer(state, "epoch"), checked_integer(state, "position")
            return cls(epoch=epoch, position=position, **cls.values_of(state))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"this is not the state of a Loader: {type(error).__name__}: {str(error)[:200]}") from None


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
