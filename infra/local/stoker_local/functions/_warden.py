"""Starts processes, keeps each to itself, and sees to it that none is left, even where this process is killed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stoker_local.functions._isolation import ProcessLimits, choose_tmp, launch_command, signal_group
from stoker_local.functions._output import Output

__all__ = ["ProcessPlan", "Warden", "warden"]

_GUARDIAN = Path(__file__).with_name("_guardian.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A process to run.

    Attributes:
        command: its program must be a path.
        environment: all of it, but for what leads to its ``/tmp``.
        folder: its code, where it runs.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    folder: str
    limits: ProcessLimits


class Warden:
    """Runs processes; see :func:`warden`.

    Attributes:
        tmp: what they get for a ``/tmp``.
    """

    def __init__(self, tmp: Literal["tmpfs", "folder"], guardian: asyncio.StreamWriter) -> None:
        self.tmp = tmp
        self._guardian = guardian

    @asynccontextmanager
    async def running(self, plan: ProcessPlan, output: Output) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a process in a group of its own; when the block is left, the whole group is killed and cleared up after.

        Args:
            plan: what runs.
            output: takes what it writes.
        """
        tmp = None if self.tmp == "tmpfs" else tempfile.mkdtemp(prefix="stoker-tmp-")
        home = {"HOME": "/tmp"} if tmp is None else {"HOME": tmp, "TMPDIR": tmp}  # noqa: S108  (its own)
        try:
            process = await asyncio.create_subprocess_exec(
                *launch_command(plan.command, plan.limits, code=plan.folder, tmp_folder=tmp),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.writer,
                stderr=output.writer,
                env={**plan.environment, **home},
                cwd=plan.folder,
                process_group=0,  # what it starts is frozen and killed with it
            )
            output.started()
            self._guardian.write(b"+%d\n" % process.pid)
            try:
                yield process
            finally:
                signal_group(process.pid, signal.SIGKILL)
                await process.wait()
                self._guardian.write(b"-%d\n" % process.pid)
        finally:
            if tmp is not None:
                shutil.rmtree(tmp, ignore_errors=True)


@asynccontextmanager
async def warden(tmp: Literal["auto", "tmpfs", "folder"]) -> AsyncIterator[Warden]:
    """Yield a warden, whose processes are killed with this one, however it ends.

    Raises:
        OSError: ``tmpfs`` is wanted and this system does not allow it.
    """
    chosen = choose_tmp(tmp)
    guardian = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_GUARDIAN)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env={},
        process_group=0,  # a terminal's Ctrl-C is not for it
    )
    assert guardian.stdin is not None  # noqa: S101  (for the type checker)
    try:
        yield Warden(chosen, guardian.stdin)
    finally:
        guardian.stdin.write(b".\n")
        guardian.stdin.close()
        await guardian.wait()
