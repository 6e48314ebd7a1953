"""What a look around found, and what to do about it; and the look at this machine and what is installed on it."""

from __future__ import annotations

import enum
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from stoker._base.sizes import format_bytes
from stoker._diagnostics.machine import Machine

__all__ = ["Finding", "Level", "machine_findings", "package_findings"]

_FEW_FILES, _ENOUGH_FILES = 128, 1024
"""A loader has up to 64 connections, and a framework's workers have files of their own."""
_LITTLE_BYTES = 1 << 30
_EXTRAS = {
    "s3": ("aioboto3", "for s3:// URLs"),
    "gcs": ("gcloud.aio.storage", "for gs:// URLs"),
    "torch": ("torch", "for stoker_torch.Loader"),
}
_EXTRA_OF = {"s3": "s3", "gs": "gcs"}


class Level(enum.StrEnum):
    """How much a finding matters, least first."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what.
        level: how it is.
        text: what was found; holds no secret.
        advice: what to do; empty if nothing.
        command: that does it, where there is one.
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    command: str = ""


def package_findings(scheme: str) -> Iterator[Finding]:
    """Look at what is installed; only what ``scheme`` needs is a problem if it is missing."""
    names = ("stoker", "numpy", "aiohttp", *(["torch"] if find_spec("torch") else []))
    shown = ", ".join(f"{name} {_version(name)}" for name in names)
    yield Finding(check="versions", level=Level.OK, text=f"Python {platform.python_version()}, {shown}")
    for extra, (module, use) in _EXTRAS.items():
        if _is_there(module) or not _is_declared(extra):
            continue
        needed = _EXTRA_OF.get(scheme) == extra
        yield Finding(
            check="extras",
            level=Level.PROBLEM if needed else Level.NOTE,
            text=f"stoker[{extra}] is not installed, {use}",
            advice="install it" if needed else "",
            command=f"pip install 'stoker[{extra}]'" if needed else "",
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(of unknown version)"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it would lie in
        return False


def _is_declared(extra: str) -> bool:
    try:
        return any(f"extra == '{extra}'" in each.replace('"', "'") for each in requires("stoker") or ())
    except PackageNotFoundError:
        return True


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Look at what a process may use of this machine."""
    limited = f", limited by {machine.limited_by}" if machine.limited_by else ""
    memory = f"{format_bytes(machine.memory_bytes)}{limited}, {format_bytes(machine.free_bytes)} of them free"
    if machine.free_bytes < _LITTLE_BYTES:
        yield Finding(
            check="memory",
            level=Level.WARNING,
            text=memory,
            advice="a loader takes 512 MB unless it is told otherwise: give it less, or this process more",
            command='Loader(memory="128MB")',
        )
    else:
        yield Finding(check="memory", level=Level.OK, text=f"{memory}; /dev/shm is not needed")
    yield Finding(check="cores", level=Level.OK, text=f"{machine.cores:g}")
    files = f"{machine.open_files:,} at once" if machine.open_files < 1 << 30 else "no limit"
    if machine.open_files >= _ENOUGH_FILES:
        yield Finding(check="open files", level=Level.OK, text=files)
        return
    advice, command = "a loader opens up to 64 connections, beside the files of everything else", ""
    if machine.most_open_files > machine.open_files:
        command = f"ulimit -n {min(4096, machine.most_open_files)}"
    if machine.most_open_files < _ENOUGH_FILES:
        advice += (
            f"; the hard limit is {machine.most_open_files:,}: have it raised where this process is started "
            "(limits.conf, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
        )
    yield Finding(
        check="open files",
        level=Level.PROBLEM if machine.open_files < _FEW_FILES else Level.WARNING,
        text=files,
        advice=advice,
        command=command,
    )
