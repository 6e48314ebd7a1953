"""Where a run is: plain values that any world size and batch size can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import StateError

__all__ = ["RunState"]

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A position and all that fixes the order behind it.

    Attributes:
        epoch: from 0.
        position: of the epoch, over all ranks: so many samples were delivered.
        dataset: id of the data set.
        version: of the manifest.
        seed: of the order.
        shuffle: of the order.
        window: of the order.
        lanes: of the order.
        limit: of every epoch, None if there is none.
    """

    epoch: int
    position: int
    dataset: str
    version: int
    seed: int
    shuffle: str
    window: int
    lanes: int
    limit: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON or ``torch.save``; ``sources`` has room for more than one data set."""
        source = asdict(self)
        return {
            "format": _FORMAT,
            "epoch": source.pop("epoch"),
            "position": source.pop("position"),
            "sources": [source],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RunState:
        """Return the state that :meth:`to_dict` gave.

        Raises:
            StateError: it is not one.
        """
        try:
            if state["format"] != _FORMAT:
                raise StateError(f"state of format {state['format']!r}: this version of stoker reads {_FORMAT}")
            (source,) = state["sources"]
            loaded = cls(epoch=state["epoch"], position=state["position"], **source)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"this is not the state of a Loader: {type(error).__name__}: {error}") from None
        for name, least in {"epoch": 0, "position": 0, "seed": 0, "version": 1, "window": 1, "lanes": 1}.items():
            number = getattr(loaded, name)
            if type(number) is not int or number < least:
                raise StateError(f"the state's {name} {number!r} is not an integer of at least {least}")
        return loaded
