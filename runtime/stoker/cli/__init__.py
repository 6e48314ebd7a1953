"""The command line: ``stoker pack``, ``info``, ``verify``, ``head`` and what other packages contribute."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper

from stoker._version import __version__
from stoker.cli import cache, compact, cost, doctor, gc, head, info, pack, rebuild, rm, token, trace, verify
from stoker.cli.command import Command
from stoker.cli.output import printable
from stoker.cli.parser import CommandParser
from stoker.errors import ConfigError, StokerError
from stoker_functions._shuffle_job import command as shuffle
from stoker_sim._commands import allocate, plan, simulate
from stoker_warm._commands import warm

__all__ = ["Command", "main"]

_COMMANDS = (
    pack.command,
    info.command,
    head.command,
    verify.command,
    rebuild.command,
    shuffle.command,
    compact.command,
    gc.command,
    rm.command,
    plan.command,
    doctor.command,
    cost.command,
    allocate.command,
    cache.command,
    simulate.command,
    trace.command,
    warm.command,
    token.command,
)
_GROUP = "stoker.commands"
_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 on failure, 2 on wrong usage, 130 when interrupted."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, TextIOWrapper):  # names may hold what a terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="stoker: %(message)s")
    parser = _parser(_commands(arguments))
    options, unknown = parser.parse_known_args(arguments)
    if unknown and not options.is_broken:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            code: int = options.run(options)
            sys.stdout.flush()
        except StokerError as error:
            if options.debug:
                raise
            print(f"stoker: error: {printable(str(error))}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            print(f"stoker: {options.when_interrupted}", file=sys.stderr)
            return _INTERRUPTED
        except BrokenPipeError:
            # Whoever read our output has gone; the interpreter's own flush at exit must not fail on it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _BROKEN_PIPE
        return code


def _parser(commands: Iterable[Command]) -> ArgumentParser:
    parser = CommandParser(
        prog="stoker",
        description="Packs training data into super-samples in a bucket, and looks after them.",
        epilog="URL is a path, or a file://, s3://, gs://, memory:// or, to read, stoker+https:// URL.",
    )
    parser.add_argument("--version", action="version", version=f"stoker {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        subparser.add_argument("--debug", action="store_true", default=SUPPRESS, help="show the traceback of an error")
        subparser.set_defaults(run=command.run, parser=subparser, when_interrupted="interrupted", is_broken=False)
        command.configure(subparser)
    return parser


def _commands(arguments: Sequence[str]) -> list[Command]:
    """Return our own commands and, unless one of them is asked for, those that other packages contribute."""
    known = {command.name for command in _COMMANDS}
    if next((argument for argument in arguments if not argument.startswith("-")), None) in known:
        return list(_COMMANDS)
    found = [_loaded(point) for point in entry_points(group=_GROUP) if point.name not in known]
    return [*_COMMANDS, *found]


def _loaded(point: EntryPoint) -> Command:
    try:
        command = point.load()
        if not isinstance(command, Command):
            raise TypeError(f"{point.value} is not a stoker.cli.Command")
    except Exception as error:  # noqa: BLE001 - whatever is wrong with another package must not break our commands
        return Command(
            name=point.name,
            help=f"(cannot be loaded: {type(error).__name__})",
            configure=_take_anything,
            run=partial(_fail, point, error),
        )
    return command


def _take_anything(parser: ArgumentParser) -> None:
    parser.set_defaults(is_broken=True)
    parser.add_argument("rest", nargs="*", help=SUPPRESS)


def _fail(point: EntryPoint, error: Exception, _: Namespace) -> int:
    raise StokerError(f"the command {point.name} ({point.value}) cannot be loaded: {error}") from error


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"stoker: warning: {printable(str(message))}", file=sys.stderr)
