"""What a command of ``stoker`` is, and how it reads its arguments: an error comes first, help begins with its own.

Other packages contribute commands through the entry points ``stoker.commands``.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

__all__ = ["BUCKET_TITLE", "Command", "CommandParser"]


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
            module: dotted name of the module, which has the functions ``configure`` and ``run``; or, where several
                commands share one, ``module:NAME``, whose functions are ``configure_NAME`` and ``run_NAME``.
            name: the word behind ``stoker``.
            help: one line.
        """
        place, _, shared = module.partition(":")

        def of(function: str) -> Callable[..., Any]:
            found: Callable[..., Any] = getattr(import_module(place), f"{function}_{shared}" if shared else function)
            return found

        return cls(
            name=name,
            help=help,
            configure=lambda parser: of("configure")(parser),
            run=lambda options: of("run")(options),
        )


BUCKET_TITLE = "how to reach"
"""What the titles of groups begin with that many commands have; they stand last."""
_OF_ALL = ("help", "debug", "version")


class CommandParser(ArgumentParser):
    """Parses the arguments of one command; parsers of its actions are of the same class."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **settings})

    def format_help(self) -> str:
        """Return the help, the options of buckets last."""
        self._action_groups.sort(key=lambda group: (group.title or "").startswith(BUCKET_TITLE))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """End the process with code 2; the error is the first line, and what to write and where to read on follow."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.format_usage()}{self.prog} --help tells more\n")


class _Formatter(HelpFormatter):
    def add_usage(self, usage: str | None, actions: Iterable[Action], groups: Any, prefix: str | None = None) -> None:
        """Show what must be given; the options are listed below."""
        listed = list(actions)
        needed = [each for each in listed if each.required or not each.option_strings]
        words = [*(["[options]"] if len(needed) < len(listed) else []), *map(self._written, needed)]
        super().add_usage(
            usage or " ".join(["%(prog)s", *(word.replace("%", "%%") for word in words)]), [], groups, prefix
        )

    def _written(self, action: Action) -> str:
        if not action.option_strings:
            return self._format_args(action, self._get_default_metavar_for_positional(action))
        value = self._format_args(action, self._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        return f"{action.option_strings[0]} {value}".strip()

    def add_arguments(self, actions: Iterable[Action]) -> None:
        """List what all commands have behind the others."""
        super().add_arguments(sorted(actions, key=lambda action: action.dest in _OF_ALL))
