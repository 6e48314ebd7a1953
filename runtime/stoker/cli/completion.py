"""``stoker completion``: prints a script with which a shell completes commands, options and file names."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from stoker._base.plugins import require_extra
from stoker.cli import create_parser, list_commands

_SHELLS = ("bash", "zsh", "fish")
_FILES = {"FILE", "SRC", "DST", "URL", "PATH", "JOBS.toml"}
"""Names of values that may be local files or folders."""
_FOLDERS = {"FOLDER"}


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(example="stoker completion bash > ~/.local/share/bash-completion/completions/stoker")


def run(args: Namespace) -> int:
    """Print the script of a shell and return the exit code.

    Raises:
        MissingExtraError: shtab is not installed.
    """
    with require_extra("stoker completion", "completion"):
        import shtab
    commands = list_commands()
    parser = create_parser(commands, {command.name for command in commands})
    for action in parser.list_arguments():
        if action.metavar in _FILES | _FOLDERS:
            action.complete = shtab.DIRECTORY if action.metavar in _FOLDERS else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0
