"""The command line: ``stoker pack``, ``info``, ``head``, ``verify`` and the commands of other packages.

A package adds a command by an entry point of the group ``stoker.commands`` that names a :class:`Command`. It may use
the modules ``flags`` (options for buckets, sizes, counts and functions) and ``output`` (tables, numbers and JSON). A
command's module is imported when the command is used.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from argparse import PARSER, SUPPRESS, Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper
from itertools import chain, takewhile
from typing import Any, NoReturn

from stoker._base.fields import make_printable
from stoker._base.terminal import styled
from stoker._version import __version__
from stoker.errors import ConfigError, StokerError

__all__ = ["BUCKET_TITLE", "Command", "CommandParser", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the command line.

    Attributes:
        name: name of the command, the word after ``stoker``.
        help: description of the command, one line.
        configure: function that adds the command's arguments to its parser.
        run: function that runs the command and returns its exit code. A :class:`~stoker.errors.StokerError` that it
            raises is printed as one line.

    Example:
        An entry point ``hello = "my_package.hello:command"`` of the group ``stoker.commands`` adds ``stoker hello``:

        >>> def configure(parser):
        ...     parser.add_argument("name", help="name to greet")
        >>> def run(options):
        ...     print("hello", options.name)
        ...     return 0
        >>> command = Command(name="hello", help="say hello", configure=configure, run=run)
    """

    name: str
    help: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]

    @classmethod
    def of_module(cls, module: str, *, name: str, help: str) -> Command:  # noqa: A002 - argparse's word
        """Return a command whose module is imported when the command is used, not when it is listed.

        Args:
            module: dotted name of the module that has the functions ``configure`` and ``run``. If several commands
                share a module: ``module:NAME``, with the functions ``configure_NAME`` and ``run_NAME``. The function
                that runs may be a coroutine function.
            name: name of the command, the word after ``stoker``.
            help: description of the command, one line.
        """
        module_name, _, shared = module.partition(":")

        def import_function(function: str) -> Callable[..., Any]:
            target: Callable[..., Any] = getattr(
                import_module(module_name), f"{function}_{shared}" if shared else function
            )
            return target

        def run(options: Namespace) -> int:
            code: int | Coroutine[None, None, int] = import_function("run")(options)
            return code if isinstance(code, int) else _run_coroutine(code)

        return cls(name=name, help=help, configure=lambda parser: import_function("configure")(parser), run=run)


def _run_coroutine(code: Coroutine[None, None, int]) -> int:
    import asyncio  # not needed to list the commands

    return asyncio.run(code)


_COMMANDS = {
    name: Command.of_module(f"stoker.cli.{module}", name=name, help=text)
    for name, module, text in (
        ("pack", "pack", "pack samples into a data set, or resume an interrupted pack"),
        ("info", "info", "show a data set's versions, size, columns and pack runs"),
        ("head", "info:head", "show the first samples of a data set"),
        ("mount", "mount", "show a data set as read-only files to every program, through FUSE"),
        ("verify", "maintenance:verify", "check every checksum of a data set; exit code 1 if one is wrong"),
        (
            "rebuild-manifest",
            "maintenance:rebuild",
            "restore a lost manifest from the super-samples; exit code 1 if some are lost or damaged",
        ),
        ("compact", "maintenance:compact", "merge the small super-samples of a data set into larger ones"),
        ("gc", "maintenance:gc", "list or delete the objects that no version of a data set needs"),
        ("rm", "maintenance:rm", "delete a data set, after confirmation"),
        (
            "doctor",
            "info:doctor",
            "diagnose problems between this machine and a data set; exit code 1 if there is one",
        ),
        ("cost", "cost", "estimate the cost of data, requests, machines and functions"),
        ("cache", "cache", "fill a disk cache before training"),
        ("trace", "trace", "show what a training run waited for, from its trace"),
        ("tier", "tier", "run a server that keeps super-samples in memory for trainers on other machines"),
        ("token", "token", "create a token with which a client reads data sets over HTTPS"),
        ("completion", "completion", "print a script that completes commands and options in bash, zsh or fish"),
    )
}
_COMMAND_GROUPS = {
    "most used": ("pack", "info", "verify", "doctor", "plan"),
    "data sets": ("head", "mount", "shuffle", "compact", "gc", "rebuild-manifest", "rm"),
    "time and cost": ("trace", "cost", "allocate", "simulate"),
    "caches and servers": ("cache", "tier", "warm", "token"),
    "more": ("demo", "completion"),
}
"""Groups of commands in the help; those of other packages are added to the last one."""
_ENTRY_POINT_GROUP = "stoker.commands"
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 on failure, 2 on wrong usage, 130 when interrupted.

    Args:
        argv: arguments after the program's name; default those of this process.

    Example:
        >>> from stoker.cli import main
        >>> main(["info", "memory://nothing"])
        1
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, TextIOWrapper):  # names may contain characters that a terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="stoker: %(message)s")
    if not arguments:
        print(_format_first_screen(), file=sys.stderr)
        return 2
    parser = _select_parser(arguments)
    options, unknown = parser.parse_known_args(arguments)
    if unknown and not options.is_broken:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.filterwarnings(
            "default", ".* (has no effect|is deprecated): ", DeprecationWarning
        )  # users can act on them
        try:
            code: int = options.run(options)
            sys.stdout.flush()
        except StokerError as error:
            if options.debug:
                raise
            label = styled("error:", "error", sys.stderr)
            print(f"stoker: {label} {make_printable(str(error))}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            print(f"stoker: {options.when_interrupted}", file=sys.stderr)
            return _EXIT_INTERRUPTED
        except BrokenPipeError:
            # The reader of our output has closed the pipe; the interpreter's flush at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _EXIT_BROKEN_PIPE
        return code


def _select_parser(arguments: Sequence[str]) -> MainParser:
    """Return a parser of the command that ``arguments`` name, or of all commands if they name none."""
    options = list(takewhile(lambda argument: argument.startswith("-"), arguments))
    requested = next(iter(arguments[len(options) :]), "")
    only = None if set(options) - {"--debug"} else _find_command(requested)  # with --help, all of them are listed
    parser = create_parser([only] if only else list_commands(), [requested])
    if requested and requested not in (names := [each.name for each in parser.commands]):
        near = get_close_matches(requested, names, n=1)
        parser.error(f"there is no command {requested!r:.40}" + (f"; do you mean {near[0]}?" if near else ""))
    return parser


def create_parser(commands: Sequence[Command], configured: Container[str]) -> MainParser:
    """Return a parser of command lines.

    Args:
        commands: commands that the parser knows.
        configured: names of the commands whose arguments it knows too, which imports their modules.
    """
    parser = MainParser(prog="stoker", description=_DESCRIPTION, epilog=_URL_FORMS)
    parser.commands = commands
    parser.add_argument("--version", action="version", version=f"stoker {__version__}")
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        subparser.add_argument("--debug", action="store_true", default=SUPPRESS, help=_DEBUG_HELP)
        subparser.set_defaults(run=command.run, parser=subparser, when_interrupted="interrupted", is_broken=False)
        if command.name in configured:
            command.configure(subparser)
    return parser


def _format_first_screen() -> str:
    """Return what ``stoker`` without a command prints: the commands that are used most."""
    commands = [_find_command(name) for name in _COMMAND_GROUPS["most used"]]
    parser = create_parser(list(filter(None, commands)), ())
    parser.epilog = "All commands: stoker --help"
    return parser.format_help()


def _find_command(name: str) -> Command | None:
    """Return the command with this name, None if there is none; loads no other command."""
    if name in _COMMANDS:
        return _COMMANDS[name]
    point = _find_entry_points().get(name)
    return None if point is None else _load_command(point)


def list_commands() -> list[Command]:
    """Return the built-in commands and those of other packages, in the order of the help."""
    commands = {name: _load_command(point) for name, point in _find_entry_points().items()} | _COMMANDS
    first = [commands.pop(name) for name in chain(*_COMMAND_GROUPS.values()) if name in commands]
    return [*first, *commands.values()]


def _find_entry_points() -> dict[str, EntryPoint]:
    """Return the entry points by name; of several with one name, this distribution's, else the first found."""
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=_ENTRY_POINT_GROUP):
        if point.name not in points or (point.dist is not None and point.dist.name == "stoker"):
            points[point.name] = point
    return points


def _load_command(point: EntryPoint) -> Command:
    try:
        command = point.load()
        if not isinstance(command, Command):
            raise TypeError(f"{point.value} is not a stoker.cli.Command")
    except Exception as error:  # noqa: BLE001 - no error in another package may break our commands
        return Command(
            name=point.name,
            help=f"(cannot be loaded: {type(error).__name__})",
            configure=_accept_any_arguments,
            run=partial(_report_load_error, point, error),
        )
    return command


def _accept_any_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(is_broken=True)
    parser.add_argument("rest", nargs="*", help=SUPPRESS)


def _report_load_error(point: EntryPoint, error: Exception, _: Namespace) -> int:
    raise StokerError(f"the command {point.name} ({point.value}) cannot be loaded: {error}") from error


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    label = styled("warning:", "warning", sys.stderr)
    print(f"stoker: {label} {make_printable(str(message))}", file=sys.stderr)


_DESCRIPTION = "Packs training data into super-samples in a bucket, and maintains data sets."
_URL_FORMS = "URL is a path, or a file://, s3://, gs://, memory:// or, to read, stoker+https:// URL."
_DEBUG_HELP = "show the traceback of an error"
BUCKET_TITLE = "how to reach"
"""Start of the titles of the groups of bucket options, which the help shows last."""
_COMMON_OPTIONS = ("help", "debug", "version")


class CommandParser(ArgumentParser):
    """Parser of one command's arguments; the parsers of its actions have the same class.

    The default ``example`` of a parser, a command line, is shown at the end of its help.

    Example:
        >>> parser = CommandParser(prog="stoker hello")
        >>> parser.set_defaults(example="stoker hello world")
        >>> print(parser.format_help().splitlines()[-1].strip())
        stoker hello world
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **settings})

    def format_help(self) -> str:
        """Return the help text, with the bucket options last."""
        self._action_groups.sort(key=lambda group: (group.title or "").startswith(BUCKET_TITLE))
        example = self.get_default("example")
        return super().format_help() + (f"\nexample:\n  {example}\n" if example else "")

    def list_arguments(self) -> Iterator[Action]:
        """Yield the visible arguments, with those of commands and their actions."""
        for action in self._actions:
            if action.nargs == PARSER and isinstance(action.choices, dict):
                for subparser in action.choices.values():
                    yield from subparser.list_arguments()
            elif action.help != SUPPRESS:
                yield action

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; print the error first, then the usage and how to show the help."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.format_usage()}see: {self.prog} --help\n")


class MainParser(CommandParser):
    """Parser of whole command lines, whose help lists the commands by group.

    Attributes:
        commands: commands that the parser knows.
    """

    commands: Sequence[Command] = ()

    def format_help(self) -> str:
        """Return the help text: usage, commands by group, options."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, ())
        formatter.add_text(self.description)
        left = {each.name: Action([], each.name, metavar=each.name, help=each.help) for each in self.commands}
        groups = {title: [left.pop(name) for name in names if name in left] for title, names in _COMMAND_GROUPS.items()}
        groups["more"] += left.values()
        groups["options"] = [each for each in self._actions if each.option_strings]
        for title, actions in groups.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class _Formatter(HelpFormatter):
    def add_usage(self, usage: str | None, actions: Iterable[Action], groups: Any, prefix: str | None = None) -> None:
        """Show the required arguments only; the options are listed below."""
        arguments = list(actions)
        needed = [each for each in arguments if each.required or not each.option_strings]
        words = [*(["[options]"] if len(needed) < len(arguments) else []), *map(self._format_usage_word, needed)]
        super().add_usage(
            usage or " ".join(["%(prog)s", *(word.replace("%", "%%") for word in words)]), [], groups, prefix
        )

    def _format_usage_word(self, action: Action) -> str:
        if not action.option_strings:
            return self._format_args(action, self._get_default_metavar_for_positional(action))
        value = self._format_args(action, self._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        return f"{action.option_strings[0]} {value}".strip()

    def add_arguments(self, actions: Iterable[Action]) -> None:
        """List the options that all commands share after the others."""
        super().add_arguments(sorted(actions, key=lambda action: action.dest in _COMMON_OPTIONS))
