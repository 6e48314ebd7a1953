"""The phases that a wait for a batch is made of, and spans of time that lie in one of them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Phase", "Span", "merged"]


class Phase(enum.StrEnum):
    """What was going on.

    Where several things go on at once, the phase is that of the one which ended last: nothing else would have made the
    wait shorter.
    """

    START = "start"
    """An iteration began: what was under way ended, and what must be known before the first item was read."""
    QUEUE = "queue"
    """An item stood in line: for a slot of the ring, for its turn at the start of a run, or for a permit."""
    TIER = "tier"
    """A nearer place than the bucket was asked."""
    FIRST_BYTE = "first_byte"
    """A request was sent, and its answer had not begun."""
    TRANSFER = "transfer"
    """Bytes arrived."""
    HEDGE = "hedge"
    """A request was so late that it was sent again: from its sending until an answer began, to whichever of them."""
    RETRY = "retry"
    """Requests that failed, or brought wrong bytes, and the pauses behind them."""
    VERIFY = "verify"
    """The checksum was calculated."""
    GATHER = "gather"
    """Rows were copied into the batch, and tensors made of them."""
    DECODE = "decode"
    """The pool worked on the batch: decode, transform, collate."""
    OTHER = "other"
    """None of these: threads handed over to each other, or had no processor."""


class Span(NamedTuple):
    """A stretch of time in one phase.

    Attributes:
        phase: which.
        begin_seconds: on the clock of whoever recorded it.
        end_seconds: on the same clock.
        object: the key that it is about, empty if none.
    """

    phase: Phase
    begin_seconds: float
    end_seconds: float
    object: str = ""

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_seconds - self.begin_seconds

    def clipped(self, begin_seconds: float, end_seconds: float) -> Span:
        """Return the part of it that lies between two moments; it may last no time, or less."""
        begin, end = max(self.begin_seconds, begin_seconds), min(self.end_seconds, end_seconds)
        return Span(self.phase, begin, end, self.object)

    def later(self, seconds: float) -> Span:
        """Return it on a clock that is ahead by so much."""
        return Span(self.phase, self.begin_seconds + seconds, self.end_seconds + seconds, self.object)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans in their order without empty ones; those that touch and are alike become one."""
    whole: list[Span] = []
    for span in spans:
        phase, begin, end, key = span
        if end <= begin:
            continue
        if whole and (last := whole[-1]).end_seconds == begin and last.phase is phase and last.object == key:
            whole[-1] = Span(phase, last.begin_seconds, end, key)
        else:
            whole.append(span)
    return whole
