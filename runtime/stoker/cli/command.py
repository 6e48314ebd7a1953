"""What a command of ``stoker`` is; other packages contribute theirs through the entry points ``stoker.commands``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

__all__ = ["Command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: the word behind ``stoker``.
        help: one line.
        configure: adds the command's arguments to its parser.
        run: does it and returns the exit code; a :class:`~stoker.errors.StokerError` is reported for it.

    Example:
        An entry point ``hello = "my_package.hello:command"`` of the group ``stoker.commands`` adds ``stoker hello``::

            command = Command(name="hello", help="say hello", configure=configure, run=run)
    """

    name: str
    help: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]

    @classmethod
    def of_module(cls, module: str, *, name: str, help: str) -> Command:  # noqa: A002 - argparse's word
        """Return a command whose module is imported when the command is used, not when it is listed.

        Args:
            module: dotted name of the module, which has the functions ``configure`` and ``run``.
            name: the word behind ``stoker``.
            help: one line.
        """

        def configure(parser: ArgumentParser) -> None:
            import_module(module).configure(parser)

        def run(options: Namespace) -> int:
            code: int = import_module(module).run(options)
            return code

        return cls(name=name, help=help, configure=configure, run=run)
