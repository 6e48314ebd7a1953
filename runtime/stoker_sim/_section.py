"""Reading a TOML file that a person wrote: each field of the type and within the bounds it must have.

A field that nobody asked for is an error too, since it is most often the misspelling of one that has a default. Every
error names the field by its whole path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from stoker._base.fields import read_toml, shown
from stoker._base.sizes import MOST_BYTES, parse_bytes
from stoker.errors import ConfigError

__all__ = ["Section", "read_section"]

Config = TypeVar("Config")
_SIZED = ("_bytes", "_bytes_per_second")
_MOST_INTEGER = (1 << 63) - 1
"""TOML's own bound, which Python's reader does not keep."""


def read_section(path: Path) -> Section:
    """Return a file's top section.

    Raises:
        ConfigError: it cannot be read, is too large, or is not TOML.
    """
    return Section(read_toml(path), str(path))


class Section:
    """A table of the file. Its methods take a field out and raise ConfigError where it is not what it must be.

    Args:
        values: of its fields.
        file: for errors.
        path: of the section in the file, such as ``bucket.first_byte``.
    """

    def __init__(self, values: Mapping[str, Any], file: str, path: str = "") -> None:
        self._left, self._file, self._path = dict(values), file, path

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def folder(self) -> Path:
        """Where the file is: what it names is relative to it."""
        return Path(self._file).parent

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST_INTEGER) -> int:
        """Return an integer from ``least`` to ``most``."""
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, value, f"an integer {_range(least, most, _MOST_INTEGER)}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0.0, most: float = math.inf) -> float:
        """Return a number from ``least`` to ``most``; where its name says bytes, ``"90MB"`` is one too."""
        value = self._take(name, default)
        number = self._size(name, value) if isinstance(value, str) and name.endswith(_SIZED) else value
        if not isinstance(number, int | float) or isinstance(number, bool) or not least <= number <= most:
            raise self.wrong(name, value, f"a number {_range(least, most, math.inf)}")
        return float(number)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a number of bytes, which may be written with a unit, such as ``"8MiB"``."""
        return self._size(name, self._take(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text that is not empty."""
        value = self._take(name, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, value, "a text")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return one of the texts in ``choices``."""
        value = self._take(name, default)
        if value not in choices:
            raise self.wrong(name, value, f"one of {', '.join(choices)}")
        return str(value)

    def within(self, name: str) -> Section:
        """Return the section of this name; an empty one if there is none."""
        value = self._left.pop(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, value, f"a table, [{self._named(name)}]")
        return Section(value, self._file, self._named(name))

    def each(self, name: str) -> list[Section]:
        """Return the sections of an array of tables, none if there is none."""
        value = self._left.pop(name, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.wrong(name, value, f"an array of tables, [[{self._named(name)}]]")
        return [Section(one, self._file, f"{self._named(name)}[{place}]") for place, one in enumerate(value)]

    def config(self, kind: type[Config], **given: Any) -> Config:
        """Return a frozen dataclass whose numbers and switches, those that are not given, are this section's fields.

        What is left out has the dataclass's default.
        """
        for field in fields(kind):  # type: ignore[arg-type]
            if field.name in self._left and field.name not in given:
                match field.type:
                    case "int":
                        given[field.name] = self.integer(field.name, least=0)
                    case "float":
                        given[field.name] = self.number(field.name)
                    case "bool":
                        given[field.name] = self.boolean(field.name, default=False)
        return self.checked(kind, **given)

    def checked(self, make: Callable[..., Config], **given: Any) -> Config:
        """Return what is made of this section's fields, all of them; what it refuses is said to be of this section."""
        self.end()
        try:
            return make(**given)
        except ConfigError as error:
            raise ConfigError(f"{self._file}: {self._path + ': ' if self._path else ''}{error}") from None

    def end(self) -> None:
        """Refuse fields that were not asked for."""
        if self._left:
            raise ConfigError(
                f"{self._file}: {self._named(min(self._left))} means nothing: leave it out, or look for a misspelling"
            )

    def wrong(self, name: str, value: object, wanted: str) -> ConfigError:
        """Return the error for a field that is not what it must be."""
        return ConfigError(f"{self._file}: {self._named(name)} is {shown(value)}, not {wanted}")

    def _size(self, name: str, value: Any) -> int:
        try:
            size_bytes = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{self._file}: {self._named(name)}: {error}") from None
        if size_bytes > MOST_BYTES:
            raise self.wrong(name, value, f"a number of bytes of at most {MOST_BYTES}, an exbibyte")
        return size_bytes

    def _take(self, name: str, default: object) -> Any:
        if name in self._left:
            value = self._left.pop(name)
            if isinstance(value, int) and not -_MOST_INTEGER <= value <= _MOST_INTEGER:
                raise self.wrong(name, value, "a number of 64 bits, as TOML has them")
            return value
        if default is None:
            raise ConfigError(f"{self._file}: {self._named(name)} is missing")
        return default

    def _named(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _range(least: float, most: float, endless: float) -> str:
    return f"of at least {least:g}" if most == endless else f"from {least:g} to {most:,.15g}"
