"""Started by path in a bare interpreter: limits this process, gives it its own ``/tmp``, and becomes a function.

It imports nothing but the standard library's lightest modules, since its time counts as cold start. Its argument
is a JSON object: ``command`` to become, ``parent`` (process to die with), ``address_bytes``, ``file_bytes`` and
``open_files`` (limits or null), ``tmp_bytes`` (size of the private ``/tmp`` or null) and ``keep`` (folders under
``/tmp`` that stay visible).

Without an argument it kills what a cloud leaves behind that dies itself. Its standard input is then a pipe that ends
with the cloud, however it dies. Until then, each line says of a process group that it has come (``+123``) or gone
(``-123``), or that all is well and over (``.``), since what was forked from the cloud's process may still hold the
pipe.

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
    """Become the command, or exit with what prevents it on standard error."""
    for limit, name in (
        (resource.RLIMIT_AS, "address_bytes"),
        (resource.RLIMIT_FSIZE, "file_bytes"),
        (resource.RLIMIT_NOFILE, "open_files"),
    ):
        if settings[name] is not None:
            _limit(limit, settings[name])
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if settings["tmp_bytes"] is not None:
            _mount_tmp(libc, settings["tmp_bytes"], settings["keep"])
        # Last, since the kernel forgets it when a process gets another user namespace.
        libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != settings["parent"]:
        sys.exit("the cloud has ended")
    os.execv(settings["command"][0], settings["command"])  # noqa: S606  (what this program is for)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (least, least))


def _mount_tmp(libc: ctypes.CDLL, size_bytes: int, keep: list[str]) -> None:
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS):  # without the right to: as root of a namespace of its own
        _check(libc.unshare(_NEW_MOUNTS | _NEW_USER), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123  (pathlib takes milliseconds to import)
                file.write(text)
    _check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "make mounts private")
    kept = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in keep]  # the way to what is about to vanish
    options = f"size={size_bytes},mode=1777".encode()
    _check(libc.mount(b"tmpfs", _TMP.encode(), b"tmpfs", _NO_SET_UID | _NO_DEVICES, options), "mount /tmp")
    for path, descriptor in kept:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        source = f"/proc/self/fd/{descriptor}".encode()
        _check(libc.mount(source, os.fsencode(path), None, _BIND | _RECURSIVE, None), f"keep {path}")
        os.close(descriptor)


def _check(result: int, what: str) -> None:
    if result:
        sys.exit(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


def guard(lines: Iterable[str]) -> None:
    """Follow the groups to the end, then kill those that are left."""
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
        guard(sys.stdin)
