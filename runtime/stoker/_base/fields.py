"""Reading what comes from outside: the fields of a JSON object, and files that a person names.

Each field has the type and lies within the bounds it must have. Nothing is converted: ``"3"`` is no integer and
``true`` no number. A field that nobody asked for is an error too, since it is most often the misspelling of one that
has a default. A file is a regular one and of a bounded size, whatever its name leads to.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker._base.sizes import format_bytes
from stoker.errors import ConfigError, EventError

_SHOWN_CHARACTERS = 80
_MAX_TEXT_CHARACTERS = 4096


class Fields:
    """The fields of one object.

    Args:
        value: what should be a JSON object.
        what: what to call it in an error, such as ``pack event``.

    Raises:
        EventError: it is no object.
    """

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise EventError(f"the {what} is {shown(value)}, not a JSON object")
        self._left: dict[str, Any] = dict(value)
        self._what = what

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def text(self, name: str, *, pattern: str = "", default: str | None = None) -> str:
        """Return a text that matches the regular expression ``pattern`` as a whole, if there is one."""
        value = self._take(name, default)
        if not isinstance(value, str) or len(value) > _MAX_TEXT_CHARACTERS:
            raise self._wrong(name, value, f"a text of at most {_MAX_TEXT_CHARACTERS} characters")
        if pattern and value != default and not re.fullmatch(pattern, value, re.ASCII):
            raise self._wrong(name, value, f"a text like {pattern}")
        return value

    def integer(self, name: str, *, least: int = 0, most: int = (1 << 53) - 1, default: int | None = None) -> int:
        """Return an integer from ``least`` to ``most``."""
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(name, value, f"an integer from {least} to {most}")
        return value

    def choice(self, name: str, choices: Sequence[str], *, default: str | None = None) -> str:
        """Return one of the texts in ``choices``."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self._wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def array(self, name: str, *, most: int, default: list[Any] | None = None) -> list[Any]:
        """Return an array of at most ``most`` elements, of any types."""
        value = self._take(name, default)
        if not isinstance(value, list) or len(value) > most:
            raise self._wrong(name, value, f"an array of at most {most} elements")
        return value

    def within(self, name: str) -> Fields:
        """Return the fields of an object within this one."""
        return Fields(self._take(name, None), f"{self._what}'s {name!r}")

    def value(self, name: str) -> Any:
        """Return whatever is there; the caller checks it."""
        return self._take(name, None)

    def end(self) -> None:
        """Raise EventError if there is a field that was not asked for."""
        if self._left:
            raise EventError(f"the {self._what} has a field {shown(min(self._left))} that means nothing; leave it out")

    def _take(self, name: str, default: object) -> Any:
        if name in self._left:
            return self._left.pop(name)
        if default is None:
            raise EventError(f"the {self._what} has no field {name!r}")
        return default

    def _wrong(self, name: str, value: object, wanted: str) -> EventError:
        return EventError(f"the {self._what}'s {name!r} is {shown(value)}, not {wanted}")


def printable(text: str) -> str:
    """Return ``text`` on one line and without control characters: a bucket must not write to a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a value as an error shows it: in printable ASCII, and not much of it."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # it is nested too deeply, or a number of too many digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


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
