"""Launcher and reaper of function processes, run by path in a bare interpreter.

With an argument, it limits this process, gives it its own ``/tmp`` and executes the function's command. It imports only
light modules of the standard library, because its time counts as cold start. The argument is a JSON object:
``command`` to execute, ``parent`` (id of the process whose death ends this one), ``address_bytes``, ``file_bytes`` and
``open_files`` (limits or null), ``tmp_bytes`` (size of the private ``/tmp`` or null) and ``keep`` (folders under
``/tmp`` that remain visible).

Without an argument, it kills the process groups that remain when the cloud's process dies. Its standard input is a pipe
that the death of the cloud's process closes. Each line announces that a process group has started (``+123``) or ended
(``-123``), or that the cloud has ended normally (``.``); the last is necessary because a fork of the cloud's process
may keep the pipe open.

``/tmp`` is a tmpfs in a private mount namespace: mount_namespaces(7), user_namespaces(7), tmpfs(5).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from typing import Any

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE, _NO_SET_UID, _NO_DEVICES = 0x1000, 0x4000, 1 << 18, 2, 4
_PARENT_DEATH_SIGNAL = 1
_TMP = "/tmp"  # noqa: S108  (the function's own)


def launch(settings: dict[str, Any]) -> None:
    """Replace this process by the command, or exit with the reason on standard error."""
    for limit, name in (
        (resource.RLIMIT_AS, "address_bytes"),
        (resource.RLIMIT_FSIZE, "file_bytes"),
        (resource.RLIMIT_NOFILE, "open_files"),
    ):
        if settings[name] is not None:
            _set_limit(limit, settings[name])
    _set_limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if settings["tmp_bytes"] is not None:
            _mount_tmp(libc, settings["tmp_bytes"], settings["keep"])
        # Last, because the kernel resets it when a process enters another user namespace.
        libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != settings["parent"]:
        sys.exit("the process of the function cloud has ended")
    os.execv(settings["command"][0], settings["command"])  # noqa: S606  (what this program is for)


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (limit, limit))


def _mount_tmp(libc: ctypes.CDLL, size_bytes: int, keep: list[str]) -> None:
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS):  # not permitted: retry as root of a new user namespace
        _check(libc.unshare(_NEW_MOUNTS | _NEW_USER), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123  (pathlib takes milliseconds to import)
                file.write(text)
    _check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "make mounts private")
    folders = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in keep]  # opened before the mount hides them
    options = f"size={size_bytes},mode=1777".encode()
    _check(libc.mount(b"tmpfs", _TMP.encode(), b"tmpfs", _NO_SET_UID | _NO_DEVICES, options), "mount /tmp")
    for path, descriptor in folders:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        source = f"/proc/self/fd/{descriptor}".encode()
        _check(libc.mount(source, os.fsencode(path), None, _BIND | _RECURSIVE, None), f"keep {path}")
        os.close(descriptor)


def _check(result: int, action: str) -> None:
    if result:
        sys.exit(f"cannot {action}: {os.strerror(ctypes.get_errno())}")


def reap_groups(lines: Iterable[str]) -> None:
    """Track process groups until the input ends or says ``.``, then kill the remaining groups."""
    groups: set[int] = set()
    for line in lines:
        if line.startswith("."):
            break
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    if len(sys.argv) > 1:
        launch(json.loads(sys.argv[1]))
    else:
        reap_groups(sys.stdin)
