"""Properties that are computed once, without a lock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801 - as the class that it extends
    """As ``functools.cached_property`` of Python 3.12, which has no lock: threads may compute a value at once.

    In Python 3.11 all instances of a class share a lock. If one thread forks while another one computes, it stays
    locked in the child, which then waits for ever.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
