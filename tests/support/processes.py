"""Processes that may be killed, forked from one that has imported their modules, so that they start quickly."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import NoReturn

__all__ = ["die", "wait_for_end", "exit_code", "child_process"]

_TIMEOUT_SECONDS = 300  # of a hang

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["stoker._pack.packer", "stoker._stores.s3", "stoker_torch"])


def die() -> NoReturn:
    """End this process at once by SIGKILL, without any clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives this")


@contextmanager
def child_process(work: Callable[..., object], *arguments: object) -> Iterator[BaseProcess]:
    """Run a function of a module in a process of its own, which is killed at the end of the block."""
    process = _context.Process(target=work, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def wait_for_end(process: BaseProcess) -> int:
    """Wait for a process to end; return its exit code, ``-SIGKILL`` if it was killed.

    Raises:
        AssertionError: it hangs.
    """
    process.join(_TIMEOUT_SECONDS)
    assert process.exitcode is not None, f"{process.name} has not ended within {_TIMEOUT_SECONDS} s"
    return process.exitcode


def exit_code(work: Callable[..., object], *arguments: object) -> int:
    """Run a function in a process of its own to its end; return the exit code as :func:`ended` does."""
    with child_process(work, *arguments) as process:
        return wait_for_end(process)
