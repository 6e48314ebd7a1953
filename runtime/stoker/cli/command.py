"""What a command of ``stoker`` is; other packages contribute theirs through the entry points ``stoker.commands``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: the word behind ``stoker``.
        help: one line.
        configure: adds the command's arguments to its parser.
        run: does it and returns the exit code; a :class:`~stoker.errors.StokerError` is reported for it.
    """

    name: str
    help: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
