"""The files of a cache process: a folder that only its user can enter, and locks."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import tempfile
from pathlib import Path

from stoker.errors import ConfigError


def runtime_folder() -> Path:
    """Return the folder of this user's sockets, which only the user can enter; it is created.

    Raises:
        ConfigError: another user owns or may enter it.
    """
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"stoker-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"the folder for the cache process's socket: {error}; set XDG_RUNTIME_DIR") from None
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"others may enter {folder}, the folder of the cache process's socket: remove it")
    return folder


def try_lock(file: Path) -> int | None:
    """Return a descriptor that holds the lock on a file, which is created; None if another process has it."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if is_at(descriptor, file):
            return descriptor
        os.close(descriptor)  # the file was removed meanwhile


def is_at(descriptor: int, file: Path) -> bool:
    """Return whether a descriptor is of the file that is at a path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def machine_label(file: Path) -> str:
    """Return the name of this machine among those of a job, 16 hexadecimal digits, from a file that is created.

    Names of hosts are no such names: in containers, many have the same.
    """
    try:
        label = file.read_text("ascii")
    except (OSError, ValueError):
        label = ""
    if not re.fullmatch(r"[0-9a-f]{16}", label):
        label = secrets.token_hex(8)
        file.write_text(label, "ascii")
    return label
