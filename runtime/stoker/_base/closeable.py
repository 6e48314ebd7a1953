"""A base class for objects that a ``with`` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closeable(ABC):
    """A context manager that closes itself at the end of the block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Stop all activity and release all resources. Idempotent."""
