"""What stands between the plan and those who take from it: items are pulled ahead, steps when their turn comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from stoker._fetch.prefetcher import Item
from stoker._order.steps import PlannedStep, StepSource

__all__ = ["StepQueue"]

Ref = TypeVar("Ref")


class StepQueue(Generic[Ref]):
    """Plans steps as far as either side has come: the prefetcher takes items, the consumer takes steps.

    Not thread-safe.

    Args:
        steps: the order; nobody else advances it.
        taken: is told of every item, with its step's epoch and end, when the next one is asked for: then it is being
            fetched, and what it is was looked for in nearer places.
    """

    def __init__(self, steps: StepSource[Ref], taken: Callable[[Ref, int, int], object] | None = None) -> None:
        self._steps, self._taken = steps, taken
        self._planned: deque[PlannedStep[Ref]] = deque()
        self._items: deque[tuple[Item[Ref], PlannedStep[Ref]]] = deque()
        self._given: tuple[Item[Ref], PlannedStep[Ref]] | None = None

    def next_item(self) -> Item[Ref] | None:
        """Return the next item in order of first use, None behind the last."""
        given, self._given = self._given, None
        if self._taken is not None and given is not None:
            item, step = given
            self._taken(item.ref, step.epoch, step.end)
        while not self._items:
            if not self._plan():
                return None
        self._given = self._items.popleft()
        return self._given[0]

    def next_step(self) -> PlannedStep[Ref] | None:
        """Return the next step, None behind the last."""
        return self._planned.popleft() if self._planned or self._plan() else None

    def peek(self) -> PlannedStep[Ref] | None:
        """Return what :meth:`next_step` would."""
        return self._planned[0] if self._planned or self._plan() else None

    def _plan(self) -> bool:
        step = self._steps.next()
        if step is None:
            return False
        self._planned.append(step)
        self._items.extend((Item(index, ref, step.number), step) for index, ref in step.first_uses)
        return True
