"""Mounts in tests: whether this machine permits them, and the program ``stoker mount``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

__all__ = ["mounted", "read_table", "unmount", "what_is_missing", "with_libfuse"]

_SYS_ADMIN = 21  # bit of the capability to mount
_TIMEOUT_SECONDS = 60


def _libfuse_of_wheel() -> str:
    """Return the libfuse in the wheel of fuse-python, empty if it is not installed or was compiled here."""
    try:
        names = [each for each in files("fuse-python") or () if each.name.startswith("libfuse")]
    except PackageNotFoundError:
        return ""
    return str(names[0].locate()) if names else ""


def _libfuse() -> tuple[dict[str, str], int]:
    """Return the variables by which mfusepy finds libfuse, and its major version; 0 if there is none."""
    if given := os.environ.get("FUSE_LIBRARY_PATH", ""):
        return {"FUSE_LIBRARY_PATH": given}, 3 if "fuse3" in given else 2
    for name, version in (("fuse3", 3), ("fuse", 2)):
        if find_library(name) is not None:
            return {"FUSE_LIBRARY_NAME": name}, version
    path = _libfuse_of_wheel()
    return ({"FUSE_LIBRARY_PATH": path}, 2) if path else ({}, 0)


def _may_mount() -> bool:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["CapEff"], 16) >> _SYS_ADMIN & 1)


def what_is_missing() -> str:
    """Return what this machine lacks for mounts, empty if it has everything."""
    variables, version = _libfuse()
    program = "fusermount3" if version == 3 else "fusermount"
    if sys.platform != "linux":
        return "these tests of mounts need Linux"
    if not variables:
        return "libfuse is not installed, and the package fuse-python has no wheel for this Python"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse does not exist, or may not be used by this user"
    if os.geteuid() and shutil.which(program) is None:
        return f"{program} is not installed, which mounts for users other than root"
    if not os.geteuid() and not _may_mount():
        return "this container may not mount: it lacks the capability SYS_ADMIN"
    return ""


def with_libfuse(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, with the variables by which mfusepy finds libfuse."""
    return {**os.environ, **_libfuse()[0], **(environment or {})}


def read_table() -> str:
    """Return the system's list of mounts."""
    return Path("/proc/mounts").read_text()


def unmount(folder: Path) -> None:
    """Unmount a folder, as users do."""
    names = ("fusermount3", "fusermount") if os.geteuid() else ("fusermount3", "fusermount", "umount")
    program = next(filter(None, map(shutil.which, names)))
    words = [str(folder)] if program.endswith("/umount") else ["-u", str(folder)]
    subprocess.run([program, *words], check=True, timeout=_TIMEOUT_SECONDS)


@contextmanager
def mounted(
    url: object, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run ``stoker mount``, and yield the process when it has printed its line; at the end, nothing stays mounted."""
    command = [sys.executable, "-m", "stoker.cli", "mount", str(url), str(folder), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=with_libfuse(environment)
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith(f"mounted {url} version "), process.stderr.read()
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_TIMEOUT_SECONDS)
        finally:
            process.kill()
            process.communicate()
            if f" {folder.absolute()} " in read_table():
                unmount(folder)
