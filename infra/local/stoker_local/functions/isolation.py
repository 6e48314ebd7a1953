"""How a function's process is kept to itself: its memory, its ``/tmp``, its environment, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Isolation", "ProcessLimits", "choose_tmp", "peak_memory_bytes", "signal_group"]

_LAUNCHER = Path(__file__).with_name("launcher.py")
_TMP = Path("/tmp")  # noqa: S108  (the function's own)
_PROBE_SECONDS = 30.0

ADDRESS_ALLOWANCE_BYTES = 1 << 30
"""What libraries, stacks and arenas take of the address space beyond what is ever resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What a process may use: memory, and the size of its ``/tmp``."""

    memory_bytes: int
    tmp_bytes: int


class Isolation:
    """The surroundings of one process; :meth:`close` removes what it left.

    Attributes:
        environment: variables that it needs to find its ``/tmp``.
    """

    def __init__(self, tmp: Literal["tmpfs", "folder"], limits: ProcessLimits, *, code: str) -> None:
        self._limits = limits
        self._folder: str | None = None if tmp == "tmpfs" else tempfile.mkdtemp(prefix="stoker-tmp-")
        self._keep = [] if self._folder else _under_tmp(sys.prefix, sys.base_prefix, code, *sys.path)
        home = self._folder or str(_TMP)
        self.environment = {"HOME": home} if self._folder is None else {"HOME": home, "TMPDIR": home}

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, folder: str, output: int
    ) -> asyncio.subprocess.Process:
        """Start ``command`` in a process group of its own, with these variables and no others.

        Args:
            command: its program must be a path.
            environment: all of it.
            folder: where it runs.
            output: descriptor that takes what it writes.
        """
        return await asyncio.create_subprocess_exec(
            *_launch(command, self._limits, folder=self._folder, keep=self._keep),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, **self.environment},
            cwd=folder,
            process_group=0,  # what it starts is frozen and killed with it
        )

    def close(self) -> None:
        """Remove the folder that stood for its ``/tmp``; a tmpfs has gone with the process."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _launch(
    command: Sequence[str], limits: ProcessLimits, *, folder: str | None, keep: Sequence[str]
) -> tuple[str, ...]:
    settings = {
        "command": list(command),
        "parent": os.getpid(),
        "address_bytes": limits.memory_bytes + ADDRESS_ALLOWANCE_BYTES,
        "file_bytes": limits.tmp_bytes if folder else None,
        "tmp_bytes": None if folder else limits.tmp_bytes,
        "keep": list(keep),
    }
    return (sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(settings))


def choose_tmp(wanted: Literal["auto", "tmpfs", "folder"]) -> Literal["tmpfs", "folder"]:
    """Return which kind of ``/tmp`` processes get, having tried a private one if it is wanted.

    Raises:
        OSError: ``tmpfs`` is wanted and this system does not allow it.
    """
    if wanted == "folder" or (wanted == "auto" and sys.platform != "linux"):
        return "folder"
    limits = ProcessLimits(memory_bytes=1 << 30, tmp_bytes=1 << 20)
    probe = _launch([shutil.which("true") or "/bin/true"], limits, folder=None, keep=())
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)  # noqa: S603
    if not tried.returncode:
        return "tmpfs"
    if wanted == "tmpfs":
        raise OSError(f"this system gives functions no private /tmp ({tried.stderr.strip()}); use tmp='folder'")
    return "folder"


def _under_tmp(*paths: str) -> list[str]:
    folders = {Path(path).resolve() for path in paths if path}
    below = {path for path in folders if _TMP in path.parents and path.is_dir()}
    return sorted(str(path) for path in below if below.isdisjoint(path.parents))


def peak_memory_bytes(pid: int) -> int:
    """Return the most resident memory that a process has had, or 0 where that cannot be told."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return 0
    peaks = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(next(peaks, "0")) << 10


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all that it has started; one that has ended is left in peace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
