"""A mount of a data set through FUSE: checks of this machine, the mount, and its end.

The library is mfusepy, the maintained fork of fusepy: it is plain Python over libfuse 2 or 3, so there is nothing to
compile, and libfuse's threads serve several requests at once. (pyfuse3 has to be compiled against libfuse 3, and serves
all requests by one event loop; fusepy has no releases since 2018, and knows libfuse 2 only.)
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from stoker._base.fields import make_printable
from stoker._base.plugins import require_extra
from stoker._files.mounted import MountedFiles
from stoker.errors import ConfigError, StokerError

_DEVICE = Path("/dev/fuse")
_LIBRARY_VARIABLES = ("FUSE_LIBRARY_PATH", "FUSE_LIBRARY_NAME")
_FOREVER_SECONDS = 10**9
"""Time for which the kernel keeps names, sizes and contents, which never change."""
_THREADS = 64
_END_SECONDS = 10.0
_INSTALL = "install it: apt install fuse3, or dnf install fuse3"


def load_binding() -> Any:
    """Return the module mfusepy with libfuse, of version 3 if there is one.

    Raises:
        MissingExtraError: mfusepy is not installed.
        StokerError: libfuse is not installed, or too old.
    """
    prefers_third = not any(map(os.environ.get, _LIBRARY_VARIABLES)) and find_library("fuse3") is not None
    if prefers_third:
        os.environ["FUSE_LIBRARY_NAME"] = "fuse3"
    try:
        with require_extra("stoker mount", "mount"):
            import mfusepy
    except (OSError, AttributeError) as error:
        raise StokerError(f"libfuse cannot be loaded ({error}); {_INSTALL}") from error
    finally:
        if prefers_third:
            del os.environ["FUSE_LIBRARY_NAME"]
    return mfusepy


def unmount_command(binding: Any, folder: Path) -> str:
    """Return the command that unmounts a folder, to show to users."""
    return f"{_mount_program(binding)} -u {folder}" if sys.platform == "linux" else f"umount {folder}"


def _mount_program(binding: Any) -> str:
    return "fusermount3" if binding.fuse_version_major == 3 else "fusermount"


def check_machine(binding: Any) -> None:
    """Check that this machine permits mounts.

    Raises:
        StokerError: the kernel has no FUSE or does not permit it, or the program that mounts for users is missing.
    """
    if sys.platform != "linux":
        return
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        problem = "may not be used by this user" if _DEVICE.exists() else "does not exist"
        raise StokerError(
            f"{_DEVICE} {problem}, but a mount needs it; run modprobe fuse as root, or start the container with "
            "--device /dev/fuse --cap-add SYS_ADMIN"
        )
    program = _mount_program(binding)
    if os.geteuid() and shutil.which(program) is None:
        raise StokerError(f"{program} is not installed, which mounts for users other than root; {_INSTALL}")


def check_folder(folder: Path, unmount: str) -> None:
    """Check that a data set can be mounted at a folder.

    Args:
        folder: where to mount the data set.
        unmount: command that unmounts the folder.

    Raises:
        ConfigError: the folder does not exist, is no folder, is not empty, or something is mounted there.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - the error says what is wrong
    except FileNotFoundError:
        raise ConfigError(f"{folder} does not exist; create it with mkdir -p {folder}") from None
    except NotADirectoryError:
        raise ConfigError(f"{folder} is not a folder; give an empty folder") from None
    except PermissionError:
        raise ConfigError(f"{folder} may not be read by this user; give an empty folder of your own") from None
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read: {error.strerror}; if a mount there has lost its process, unmount it: {unmount}"
        ) from error
    if os.path.ismount(folder):
        raise ConfigError(f"something is mounted at {folder} already; unmount it ({unmount}), or give another folder")
    if names:
        raise ConfigError(f"{folder} is not empty: it has {names[0]!r:.80}; give an empty folder")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} is not writable for this user, as a mount requires; give a folder of your own")


class Mount:
    """A mounted data set. Threads of libfuse serve the requests of the kernel, so the caller's thread stays free.

    Args:
        binding: the module mfusepy.
        files: the files.
        folder: where to mount them, an absolute path.
        source: name of the data set in the system's list of mounts.
        on_end: function that is called, in another thread, when the data set is not mounted any more.
    """

    def __init__(
        self, binding: Any, files: MountedFiles, folder: Path, source: str, on_end: Callable[[], object]
    ) -> None:
        self._binding, self._files, self._folder = binding, files, folder
        self._source, self._on_end = make_printable(source).replace("\\", "\\\\").replace(",", "\\,"), on_end
        self._thread = threading.Thread(target=self._serve, name="stoker-mount", daemon=True)
        self._error: Exception | None = None

    def open(self) -> None:
        """Mount, and return when programs see the files.

        Raises:
            StokerError: the mount failed.
        """
        self._thread.start()
        while not self._files.started.wait(0.01):
            if not self._thread.is_alive():
                raise StokerError(
                    f"the data set could not be mounted at {self._folder}: libfuse returned {self._error}, and has "
                    "printed the cause above"
                )
        with suppress(OSError):  # it is unmounted already
            os.stat(self._folder)  # noqa: PTH116 - its answer comes after the start

    def close(self) -> None:
        """Let reads in progress fail, and unmount the data set, even if files are open. Idempotent.

        Raises:
            StokerError: libfuse failed, or does not end.
        """
        self._files.close(self._binding.fuse_exit)
        if self._thread.is_alive():
            # libfuse ends its loop within a request only. The kernel does not know this name, so it asks.
            threading.Thread(target=self._request, args=(secrets.token_hex(16),), daemon=True).start()
            self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            raise StokerError(f"libfuse does not end; unmount with {unmount_command(self._binding, self._folder)} -z")
        if self._error is not None and self._files.started.is_set():
            raise StokerError(f"the mount at {self._folder} has failed: libfuse returned {self._error}")

    def _request(self, name: str) -> None:
        with suppress(OSError):
            os.stat(self._folder / name)  # noqa: PTH116 - Path.exists would need no suppress, but say less

    def _serve(self) -> None:
        try:
            self._binding.FUSE(self._files, str(self._folder), **self._mount_options())
        except RuntimeError as error:
            self._error = error
        finally:
            self._on_end()

    def _mount_options(self) -> dict[str, Any]:
        version = (self._binding.fuse_version_major, self._binding.fuse_version_minor)
        options: dict[str, Any] = {
            "foreground": True,
            "ro": True,
            "nosuid": True,
            "nodev": True,
            "default_permissions": True,
            "kernel_cache": True,
            "use_ino": True,
            "entry_timeout": _FOREVER_SECONDS,
            "negative_timeout": _FOREVER_SECONDS,
            "attr_timeout": _FOREVER_SECONDS,
            "fsname": self._source,
            "subtype": "stoker",
        }
        if version >= (3, 0):
            options["max_idle_threads"] = _THREADS
        if version >= (3, 12):
            options["max_threads"] = _THREADS
        return options
