"""Where a run is: plain values that any world size and batch size can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from reprlib import repr as shown
from typing import Any, Self

from stoker.errors import StateError
from stoker_torch._config import StreamConfig

__all__ = ["RunState", "SourceState", "checked_integer"]

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
