"""Commands, their flags and positional arguments, with choices and defaults."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from stoker import cli
from stoker_local import __main__ as local

__all__ = ["command_line"]


def command_line(_: Path) -> Iterator[str]:
    """Return a line for each command and each of its arguments."""
    listed = cli._select_parser([])
    yield from _names_of(listed)
    for name in _commands_of(listed):
        yield from _names_of(_commands_of(cli._select_parser([name]))[name])
    yield from _names_of(local._parser())


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def _names_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield parser.prog
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _names_of(command)
        else:
            yield " ".join([parser.prog, *_words(action)])


def _words(action: argparse.Action) -> Iterator[str]:
    yield "|".join(action.option_strings) or str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        yield str(action.metavar or ("VALUE" if action.choices is None else "CHOICE"))
    if action.nargs not in (None, 0):
        yield f"nargs={action.nargs}"
    if action.choices is not None:
        yield f"choices={','.join(map(str, action.choices))}"
    if action.default is not False and action.default not in (None, argparse.SUPPRESS, []):
        yield f"default={action.default}"
    if action.option_strings and action.required:
        yield "required"
    if isinstance(action, argparse._AppendAction):
        yield "repeatable"
