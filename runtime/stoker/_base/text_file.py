"""Reading a file that a person names: a regular one and of a bounded size, whatever the name leads to."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from stoker._base.sizes import format_bytes
from stoker.errors import ConfigError

__all__ = ["read_text", "read_toml"]

_MOST_TOML_BYTES = 1 << 20
"""A thousand jobs, or prices of a hundred clouds, are a tenth of that."""


def read_text(path: Path, *, most_bytes: int) -> str:
    """Return what a file holds, which is UTF-8.

    Raises:
        ConfigError: there is none, it cannot be read, is a device, a pipe or a folder, or has more than ``most_bytes``.
        UnicodeDecodeError: it is no text.
    """
    try:
        with open(path, "rb", opener=_at_once) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(most_bytes + 1) if is_regular else b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:  # the name holds a NUL
        raise ConfigError(f"{str(path)!r} cannot be read: no file has such a name") from None
    if not is_regular:
        raise ConfigError(f"{path} cannot be read: it is no regular file; write what it would say into one")
    if len(data) > most_bytes:
        raise ConfigError(f"{path} is larger than {format_bytes(most_bytes)}, the most that is read of such a file")
    return data.decode("utf-8")


def _at_once(path: str, flags: int) -> int:
    """Open a file; of a pipe, without waiting for somebody who writes into it."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the document that a TOML file of at most 1 MiB is.

    Raises:
        ConfigError: it cannot be read, is too large, or is not TOML.
    """
    try:
        return tomllib.loads(read_text(path, most_bytes=_MOST_TOML_BYTES))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
