"""How a function's process is kept to itself: its memory and its ``/tmp``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

__all__ = ["ProcessLimits", "choose_tmp", "launch_command", "peak_memory_bytes", "signal_group"]

_LAUNCHER = Path(__file__).with_name("_launcher.py")
_TMP = Path("/tmp")  # noqa: S108  (the function's own)
_PROBE_SECONDS = 30.0

ADDRESS_ALLOWANCE_BYTES = 1 << 30
"""What libraries, stacks and arenas take of the address space beyond what is ever resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What a process may use: memory, its ``/tmp``, and files open at once (None: as many as this process)."""

    memory_bytes: int
    tmp_bytes: int
    open_files: int | None = None


def launch_command(
    command: Sequence[str], limits: ProcessLimits, *, code: str, tmp_folder: str | None
) -> tuple[str, ...]:
    """Return the command that becomes ``command`` within its limits.

    Args:
        command: its program must be a path.
        limits: of the process.
        code: a folder that it must see even below ``/tmp``.
        tmp_folder: what stands for its ``/tmp``; None gives it a tmpfs.
    """
    settings = {
        "command": list(command),
        "parent": os.getpid(),
        "address_bytes": limits.memory_bytes + ADDRESS_ALLOWANCE_BYTES,
        "file_bytes": limits.tmp_bytes if tmp_folder else None,
        "open_files": limits.open_files,
        "tmp_bytes": None if tmp_folder else limits.tmp_bytes,
        "keep": _under_tmp(sys.prefix, sys.base_prefix, code, *sys.path),
    }
    return (sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(settings))


def choose_tmp(wanted: Literal["auto", "tmpfs", "folder"]) -> Literal["tmpfs", "folder"]:
    """Return which kind of ``/tmp`` processes get, having tried a private one if it is wanted.

    Raises:
        OSError: ``tmpfs`` is wanted and this system does not allow it.
    """
    if wanted == "folder" or (wanted == "auto" and sys.platform != "linux"):
        return "folder"
    problem = _mount_problem()
    if wanted == "tmpfs" and problem:
        raise OSError(f"this system gives functions no private /tmp ({problem}); use tmp='folder'")
    return "folder" if problem else "tmpfs"


@cache
def _mount_problem() -> str:
    """Return why processes can have no ``/tmp`` of their own here, or nothing if they can."""
    limits = ProcessLimits(memory_bytes=1 << 30, tmp_bytes=1 << 20)
    probe = launch_command([shutil.which("true") or "/bin/true"], limits, code="", tmp_folder=None)
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)  # noqa: S603
    return (tried.stderr.strip() or "it failed") if tried.returncode else ""


def _under_tmp(*paths: str) -> list[str]:
    folders = {Path(path).resolve() for path in paths if path}
    below = {path for path in folders if _TMP in path.parents and path.is_dir()}
    return sorted(str(path) for path in below if below.isdisjoint(path.parents))


def peak_memory_bytes(pid: int) -> int:
    """Return the most resident memory that a process or one that it has started has had; 0 where that cannot be told.

    They are not added up: what was forked shares pages.
    """
    status = _text_of(f"/proc/{pid}/status")
    peaks = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return max([int(next(peaks, "0")) << 10, *map(peak_memory_bytes, _children(pid))])


def _children(pid: int) -> list[int]:
    threads = f"/proc/{pid}/task"
    try:
        names = os.listdir(threads)  # noqa: PTH208  (pathlib is slow, and this is done after every invocation)
    except OSError:
        return []
    return [int(child) for name in names for child in _text_of(f"{threads}/{name}/children").split()]


def _text_of(path: str) -> str:
    """Return what the kernel says, or nothing of a process or thread that has ended."""
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return ""


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all that it has started; one that has ended is left in peace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
