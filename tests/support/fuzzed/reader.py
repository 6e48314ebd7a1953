"""Requirements of readers of untrusted bytes, and the outcomes of reading.

A reader either raises one of its typed errors or returns a value with guaranteed properties, which ``read`` checks
with assertions. Any other outcome is a bug. Shared by the mutations of the test suite and by the
coverage-guided runs of ``tests/fuzz``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import StokerError
from support.fuzzed.mutations import Mutate

__all__ = ["Outcome", "Place", "Reader", "places_of"]

Place = tuple[str, int]
"""A file, and the line in it that raises an error."""

MAX_MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of reading.

    Attributes:
        kind: what ``read`` returned, or the name of the error's type.
        places: places at which the error and its causes were raised, in this order; empty without an error.
    """

    kind: str
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader under attack.

    Attributes:
        read: function that reads everything, checks the properties and returns the kind of the value.
        seeds: function that returns valid inputs.
        mutate: function that makes hostile inputs of them.
        errors: errors that may be raised.
        kinds: values that ``read`` may return; each of them and of ``errors`` must occur.
        refusing: functions whose every ``raise`` must be reached.
    """

    read: Callable[[bytes], str]
    seeds: Callable[[], Sequence[bytes]]
    mutate: Mutate
    errors: tuple[type[StokerError], ...]
    kinds: tuple[str, ...] = ("read",)
    refusing: tuple[Callable[..., Any], ...] = ()

    def outcome(self, data: bytes) -> Outcome:
        """Return the outcome of reading ``data``."""
        try:
            return Outcome(self.read(data))
        except self.errors as error:
            outcome, message = Outcome(type(error).__name__, tuple(places_of(error))), str(error)
        assert len(message) <= MAX_MESSAGE_CHARACTERS
        return outcome


def places_of(error: BaseException | None) -> Iterator[Place]:
    """Yield the places at which an error and its causes were raised."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        error = error.__context__
