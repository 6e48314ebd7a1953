"""One node of a warm tier through time: when it loses what it holds, when that is noticed, and what it is called for.

The policy is the proxy's. A node is called when there was no contact with it for some time. At each of its turns a
second instance gets what is new to it, and is started if it is gone. Whoever is left is called next, so memory is lost
when the last instance goes; that shows at the next contact, and there is no instance before.

From one strike of the platform to the next the schedule is arithmetic, so that little is played.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.errors import ConfigError
from stoker_sim._models.reclaim import Strike, Struck
from stoker_warm._upkeep import UpkeepConfig

__all__ = ["NodeLife", "lived"]

_ROUNDING = 1e-9
"""Parts of an interval that two times which are the same may differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLife:
    """What became of a node.

    Attributes:
        losses: when its memory was lost, and when the proxy noticed, in seconds from 0 and rising.
        greetings: calls that were made because another one had found the first instance gone, so that whoever is there
            instead says what it holds.
        copies: second instances that were started, and given all that the first one held.
        checks: turns at which the second instance was called, copies included.
        warm_calls: to keep it warm.
    """

    losses: tuple[tuple[float, float], ...]
    greetings: int
    copies: int
    checks: int
    warm_calls: float


class _Node:
    """The instances of a node, and what is due."""

    def __init__(self, upkeep: UpkeepConfig, offset: float, uses_per_second: float, rng: random.Random) -> None:
        self._warm_seconds, self._turn_seconds = upkeep.warm_seconds, upkeep.backup_seconds
        self._offset, self._uses_per_second, self._rng = offset, uses_per_second, rng
        self._has_first, self._has_second = True, False
        self._noticed_seconds = math.inf  # when the first one's absence will have been
        self._paired_seconds = self._turn(0.0, _ROUNDING)  # when a second one will be there
        self._contact_seconds = (upkeep.warm_seconds or 0.0) * (offset - 1)  # from which warm calls are counted
        self.losses: list[tuple[float, float]] = []
        self.greetings = self.copies = 0

    def pass_until(self, seconds: float) -> None:
        """Let happen what is due."""
        while (due_seconds := min(self._noticed_seconds, self._paired_seconds)) <= seconds:
            self._contact_seconds = due_seconds
            if due_seconds == self._noticed_seconds:
                # The second one, if it is there, serves from here on.
                self._has_first, self._has_second, self._noticed_seconds = True, False, math.inf
                self._paired_seconds = self._turn(due_seconds, -_ROUNDING)
                self.greetings += self._paired_seconds > due_seconds  # at a turn it is called anyway
            else:
                self._has_second, self._paired_seconds = True, math.inf
                self.copies += 1

    def struck(self, strike: Strike) -> None:
        """The platform takes instances, if they are there."""
        had_any = self._has_first or self._has_second
        if strike.takes is not Struck.SECOND and self._has_first:
            self._has_first = False
            self._noticed_seconds = self._contact(strike.seconds)
        if strike.takes is not Struck.FIRST and self._has_second:
            self._has_second = False
            self._paired_seconds = self._turn(strike.seconds, _ROUNDING)
        if had_any and not (self._has_first or self._has_second):
            self._paired_seconds = math.inf  # there is nothing to be copied
            self.losses.append((strike.seconds, self._noticed_seconds))

    def _turn(self, seconds: float, margin: float) -> float:
        """Return the node's first turn after that time, or from it on if the margin is negative."""
        if self._turn_seconds is None:
            return math.inf
        turns = max(0, math.ceil(seconds / self._turn_seconds - self._offset + margin))
        return (turns + self._offset) * self._turn_seconds

    def _contact(self, seconds: float) -> float:
        """Return when the node is called or used next."""
        turn_seconds, since_seconds = self._turn(seconds, _ROUNDING), self._contact_seconds
        if self._turn_seconds is not None:
            since_seconds = max(since_seconds, turn_seconds - self._turn_seconds)
        warm_seconds = math.inf
        if self._warm_seconds is not None:
            calls = math.floor((seconds - since_seconds) / self._warm_seconds + _ROUNDING) + 1
            warm_seconds = since_seconds + calls * self._warm_seconds
        used_seconds = seconds + self._rng.expovariate(self._uses_per_second) if self._uses_per_second else math.inf
        return min(warm_seconds, turn_seconds, used_seconds)


def lived(
    upkeep: UpkeepConfig,
    strikes: Iterable[Strike],
    seconds: float,
    *,
    offset: float,
    uses_per_second: float,
    rng: random.Random,
) -> NodeLife:
    """Return what becomes of a node that always holds something.

    Args:
        upkeep: how often it is called; the second instance at each turn.
        strikes: what the platform takes, in the order of time.
        seconds: that are looked at.
        offset: 0 to 1, of its turns: the first ones come when this part of each interval has passed.
        uses_per_second: how often it is read from or written to, at random times.
        rng: for these times.

    Raises:
        ConfigError: the offset or the rate is out of bounds, nothing ever calls the node, or its second instance is not
            called at each turn.
    """
    if not (0 <= offset <= 1 and 0 <= uses_per_second < math.inf):
        raise ConfigError(f"offset is 0 to 1, uses_per_second at least 0, not {offset} and {uses_per_second}")
    turn_seconds = upkeep.backup_seconds
    if upkeep.warm_seconds is None and turn_seconds is None and not uses_per_second:
        raise ConfigError("nothing ever calls the node: set warm_seconds or backup_seconds")
    if turn_seconds is not None and (upkeep.peer_seconds is None or upkeep.peer_seconds > turn_seconds):
        raise ConfigError(f"peer_seconds must be at most backup_seconds, {turn_seconds}, not {upkeep.peer_seconds}")
    node = _Node(upkeep, offset, uses_per_second, rng)
    for strike in strikes:
        if strike.seconds >= seconds:
            break
        node.pass_until(strike.seconds)
        node.struck(strike)
    node.pass_until(seconds)
    return NodeLife(
        losses=tuple(node.losses),
        greetings=node.greetings,
        copies=node.copies,
        checks=math.floor(seconds / turn_seconds) if turn_seconds is not None else 0,
        warm_calls=_warm_calls(upkeep, seconds, uses_per_second),
    )


def _warm_calls(upkeep: UpkeepConfig, seconds: float, uses_per_second: float) -> float:
    """Return how often the time since the last contact gets too long.

    Between uses at random times with a rate r a call comes once in (exp(rW) - 1) / r seconds. Of a node that has
    turns, too, this is up to a tenth short: its first call after a turn may come before the mean says.
    """
    if upkeep.warm_seconds is None:
        return 0.0
    calls = seconds / upkeep.warm_seconds
    if upkeep.backup_seconds is not None:  # turns are contacts
        calls = seconds / upkeep.backup_seconds * (math.ceil(upkeep.backup_seconds / upkeep.warm_seconds) - 1)
    uses = uses_per_second * upkeep.warm_seconds
    return calls * uses / math.expm1(uses) if uses else calls
