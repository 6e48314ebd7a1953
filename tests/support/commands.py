"""Commands of ``stoker``, run in processes that are forked with what commands import, or as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import stoker.cli
from support.forked_programs import ForkedPrograms, forked_programs

__all__ = ["forked_commands", "run_command"]

_PROGRAM = Path(stoker.cli.__file__).with_name("__main__.py")
_IMPORTS = (
    "aiobotocore.session",
    "stoker._diagnostics.doctor",
    "stoker._stores.s3",
    "stoker.cli.info",
    "stoker.cli.maintenance",
    "stoker.cli.pack",
    "stoker.cli.tier",
    "stoker_functions",
    "stoker_warm._commands.warm",
)
"""What takes most of the time of commands; each imports what else it needs."""
_TIMEOUT_SECONDS = 300  # of a hang
_running: list[ForkedPrograms] = []


@contextmanager
def forked_commands() -> Iterator[None]:
    """Let commands be forked in the block, which takes a tenth of the time of those that begin with an interpreter."""
    with forked_programs(imports=_IMPORTS) as forked:
        _running.append(forked)
        try:
            yield
        finally:
            _running.remove(forked)


def run_command(
    *arguments: object, environment: Mapping[str, str] | None = None, is_anew: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        arguments: the command's.
        environment: its environment; default this process's.
        is_anew: whether it begins with an interpreter of its own, as at a user's; else it is forked.
    """
    words = list(map(str, arguments))
    if is_anew:
        return subprocess.run(
            [sys.executable, "-m", "stoker.cli", *words],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env=environment,
        )
    program = _running[-1].start(_PROGRAM, *words, environment=environment)
    out, err = program.communicate(_TIMEOUT_SECONDS)
    return subprocess.CompletedProcess(words, program.returncode, out, err)
