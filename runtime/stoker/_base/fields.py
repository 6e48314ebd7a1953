"""Validated input: JSON objects, read field by field or as a dataclass, and files that users name.

Types and bounds of fields are checked, and nothing is converted: ``"3"`` is not an integer, and ``true`` not a number.
An unknown field is an error, since it is probably a misspelling of one with a default. A file must be a regular file
of bounded size.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stoker._base.sizes import format_bytes
from stoker.errors import ConfigError, EventError

T = TypeVar("T")

_MAX_QUOTED_CHARACTERS = 80
_MAX_TEXT_CHARACTERS = 4096


class JsonFields:
    """The fields of one JSON object.

    Args:
        value: untrusted value.
        what: description of the object for errors, such as ``pack event``.

    Raises:
        EventError: the value is not a JSON object.
    """

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise EventError(f"the {what} is {quote_value(value)}, not a JSON object")
        self._left: dict[str, Any] = dict(value)
        self._what = what

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def text(self, name: str, *, pattern: str = "", default: str | None = None) -> str:
        """Return a text, which must fully match the regular expression ``pattern`` if that is not empty."""
        value = self._take(name, default)
        if not isinstance(value, str) or len(value) > _MAX_TEXT_CHARACTERS:
            raise self._value_error(name, value, f"a text of at most {_MAX_TEXT_CHARACTERS} characters")
        if pattern and value != default and not re.fullmatch(pattern, value, re.ASCII):
            raise self._value_error(name, value, f"a text like {pattern}")
        return value

    def integer(
        self, name: str, *, min_value: int = 0, max_value: int = (1 << 53) - 1, default: int | None = None
    ) -> int:
        """Return an integer from ``min_value`` to ``max_value``."""
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not min_value <= value <= max_value:
            raise self._value_error(name, value, f"an integer from {min_value} to {max_value}")
        return value

    def choice(self, name: str, choices: Sequence[str], *, default: str | None = None) -> str:
        """Return one of the texts in ``choices``."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self._value_error(name, value, f"one of {', '.join(choices)}")
        return value

    def array(self, name: str, *, max_length: int, default: list[Any] | None = None) -> list[Any]:
        """Return an array of at most ``max_length`` elements, of any types."""
        value = self._take(name, default)
        if not isinstance(value, list) or len(value) > max_length:
            raise self._value_error(name, value, f"an array of at most {max_length} elements")
        return value

    def nested(self, name: str) -> JsonFields:
        """Return the fields of a nested object."""
        return JsonFields(self._take(name, None), f"{self._what}'s {name!r}")

    def value(self, name: str) -> Any:
        """Return a value of any type; the caller must validate it."""
        return self._take(name, None)

    def check_no_fields_left(self) -> None:
        """Raise EventError if the object has a field that was not read."""
        if self._left:
            raise EventError(f"the {self._what} has an unknown field {quote_value(min(self._left))}; remove it")

    def _take(self, name: str, default: object) -> Any:
        if name in self._left:
            return self._left.pop(name)
        if default is None:
            raise EventError(f"the {self._what} has no field {name!r}")
        return default

    def _value_error(self, name: str, value: object, wanted: str) -> EventError:
        return EventError(f"the {self._what}'s {name!r} is {quote_value(value)}, not {wanted}")


def read_record(kind: type[T], values: object, where: str) -> T:
    """Convert a mapping to a dataclass; fields that the mapping lacks get their defaults.

    Args:
        kind: dataclass with fields of type str, int, float, bool, date, Literal, Enum, tuple, Mapping or dataclass,
            optionally with bounds (:class:`~stoker._base.arguments.NumberBound`).
        values: mapping from a JSON or TOML document.
        where: path of the mapping for errors, which omit values of a wrong type because they may be secrets.

    Raises:
        ConfigError: a field is unknown, missing, of a wrong type or out of bounds, or the dataclass rejects it.
    """
    table: dict[str, Any] = _check_type(dict, values, where)
    known_fields = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # mypy knows no type of dataclasses
    if unknown := sorted(table.keys() - known_fields.keys()):
        raise ConfigError(
            f"{where} has an unknown field {unknown[0]!r:.80}; the fields are: {', '.join(sorted(known_fields))}"
        )
    needed = [
        each.name for each in known_fields.values() if each.default is MISSING and each.default_factory is MISSING
    ]
    if missing := [name for name in needed if name not in table]:
        raise ConfigError(f"{where} lacks the field {missing[0]!r}")
    hints = _hints_of(kind)  # type: ignore[arg-type]  # classes can be hashed
    converted = {name: _convert_value(hints[name], value, f"{where}.{name}") for name, value in table.items()}
    try:
        return kind(**converted)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    """Return the annotations of a class; cached, since resolving them takes longer than reading a record."""
    return get_type_hints(kind, include_extras=True)


def _convert_value(hint: Any, value: Any, where: str) -> Any:
    """Validate a value, and convert it to its annotated type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _convert_bounded(parts, value, where)
    if origin in (Union, UnionType):  # something or None
        return None if value is None else _convert_value(parts[0], value, where)
    if origin is tuple:
        return _convert_tuple(parts, value, where)
    if origin is Mapping:
        keys, values = parts
        return {
            _convert_value(keys, name, f"a name in {where}"): _convert_value(values, each, f"{where}.{name}")
            for name, each in _check_type(dict, value, where).items()
        }
    if is_dataclass(hint):
        return read_record(hint, value, where)  # type: ignore[arg-type]  # a type, since hints are
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        choices = parts or tuple(each.value for each in hint)
        if value not in choices:
            raise ConfigError(f"{where} is not one of {', '.join(map(repr, choices))}")
        return value if parts else hint(value)
    return _check_type(hint, value, where)


def _convert_bounded(parts: tuple[Any, ...], value: Any, where: str) -> Any:
    hint, *bounds = parts
    converted = _convert_value(hint, value, where)
    for bound in bounds:
        if converted is not None and not bound.admits(converted):
            raise ConfigError(f"{where} must be {bound}, not {quote_value(converted)}")
    return converted


def _convert_tuple(parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    array = _check_type(list, value, where)
    hints = parts if parts[-1] is not Ellipsis else parts[:1] * len(array)
    if len(hints) != len(array):
        raise ConfigError(f"{where} has {len(array)} elements, not {len(hints)}")
    return tuple(
        _convert_value(hint, each, f"{where}[{n}]") for n, (hint, each) in enumerate(zip(hints, array, strict=True))
    )


_NAMES = {dict: "an object (a table)", list: "an array"}


def _check_type(hint: Any, value: Any, where: str) -> Any:
    """Return a value of a plain type; an int is a valid float, and a bool is neither."""
    if hint is not Any and type(value) not in ((int, float) if hint is float else (hint,)):
        raise ConfigError(f"{where} is of type {type(value).__name__}, not {_NAMES.get(hint, hint.__name__)}")
    return value


def make_printable(text: str) -> str:
    """Escape line breaks and control characters in ``text``, since text from a bucket must not control a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quote_value(value: object) -> str:
    """Return a value in printable ASCII for an error message, at most 80 characters."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # too deeply nested, or an integer with too many digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}…"


_MAX_TOML_BYTES = 1 << 20
"""Ten times the size of a file with a thousand jobs, or with prices of a hundred clouds."""


def read_text(path: Path, *, max_bytes: int) -> str:
    """Return the content of a UTF-8 file of at most ``max_bytes`` bytes.

    Raises:
        ConfigError: the file does not exist, cannot be read, is not a regular file, or is too large.
        UnicodeDecodeError: the content is not UTF-8.
    """
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(max_bytes + 1) if is_regular else b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:  # the name contains a NUL
        raise ConfigError(f"{str(path)!r} cannot be read: no file can have this name") from None
    if not is_regular:
        raise ConfigError(f"{path} cannot be read: it is not a regular file; write its content to a file first")
    if len(data) > max_bytes:
        raise ConfigError(f"{path} is larger than {format_bytes(max_bytes)}, the limit for such a file")
    return data.decode("utf-8")


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file, without waiting for a writer if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file of at most 1 MiB.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not TOML.
    """
    try:
        return tomllib.loads(read_text(path, max_bytes=_MAX_TOML_BYTES))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
