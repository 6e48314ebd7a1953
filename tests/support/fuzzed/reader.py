"""What is asked of a reader of bytes from anywhere, and how it ends.

A reader either raises a typed error of its own kinds or gives something that keeps its promises, which ``read`` checks
with assertions. Whatever else comes out of it is a bug. Shared by the mutations of the test suite and by the
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
"""A file and the line in it that raises an error."""

MOST_MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How reading ended.

    Attributes:
        kind: what ``read`` returned, or the name of the error's type.
        places: where the error was raised, then where what it was raised for was; none if there was no error.
    """

    kind: str
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader under attack.

    Attributes:
        read: reads all there is to read, checks the promises and says in a word what it was.
        seeds: returns valid inputs.
        mutate: makes hostile ones of them.
        errors: what may be raised.
        kinds: what ``read`` may return; every one of these and of ``errors`` must come up.
        refusing: functions whose every ``raise`` must be reached.
    """

    read: Callable[[bytes], str]
    seeds: Callable[[], Sequence[bytes]]
    mutate: Mutate
    errors: tuple[type[StokerError], ...]
    kinds: tuple[str, ...] = ("read",)
    refusing: tuple[Callable[..., Any], ...] = ()

    def outcome(self, data: bytes) -> Outcome:
        """Return how reading ``data`` ends."""
        try:
            return Outcome(self.read(data))
        except self.errors as error:
            outcome, message = Outcome(type(error).__name__, tuple(places_of(error))), str(error)
        assert len(message) <= MOST_MESSAGE_CHARACTERS
        return outcome


def places_of(error: BaseException | None) -> Iterator[Place]:
    """Yield where an error was raised, and where what it was raised for was."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        error = error.__context__
