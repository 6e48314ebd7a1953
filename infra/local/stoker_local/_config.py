"""Configurations read from JSON, and what several of them check.

Errors of reading name where and what, never the value, which may be a secret.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def is_this_machine(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``; any name but localhost might lead elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unique_names(what: str, names: Iterable[str]) -> set[str]:
    """Return names, none of which may be there twice.

    Raises:
        ValueError: one is.
    """
    counted = Counter(names)
    if repeated := [name for name, count in counted.items() if count > 1]:
        raise ValueError(f"a {what} is named twice: {', '.join(repeated)}")
    return set(counted)


def read_json(kind: type[T], text: str, *, where: str) -> T:
    """Return the dataclass that a JSON object describes; what the object leaves out has its default.

    Args:
        kind: a dataclass of texts, numbers, truth values, choices, enumerations, tuples, mappings and dataclasses.
        text: the JSON.
        where: names the object in errors.

    Raises:
        ValueError: it is not a JSON object, a field is unknown, missing, of another type, or refused by the dataclass.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    return _read_record(kind, values, where)


def _read_record(kind: type[T], document: object, where: str) -> T:
    values = _of_type(dict, document, where)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # mypy knows no type of dataclasses
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(
            f"{where} has a field {unknown[0]!r} that means nothing; there are: {', '.join(sorted(known))}"
        )
    needed = [each.name for each in known.values() if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{where} lacks the field {missing[0]!r}")
    hints = get_type_hints(kind)
    read = {name: _read(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    try:
        return kind(**read)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read(hint: Any, value: Any, where: str) -> Any:
    """Return a value as its annotation has it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:  # something or None
        return None if value is None else _read(arguments[0], value, where)
    if origin is tuple:
        return _tuple(arguments, _of_type(list, value, where), where)
    if origin is Mapping:
        return {
            _read(arguments[0], name, f"a name in {where}"): _read(arguments[1], each, f"{where}.{name}")
            for name, each in _of_type(dict, value, where).items()
        }
    if is_dataclass(hint):
        return _read_record(hint, value, where)  # type: ignore[arg-type]  # a type, since hints are
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        choices = arguments or [each.value for each in hint]
        if value not in choices:
            raise ValueError(f"{where} is not one of {', '.join(map(repr, choices))}")
        return value if arguments else hint(value)
    return value if hint is Any else _of_type(hint, value, where)


def _tuple(arguments: tuple[Any, ...], values: list[Any], where: str) -> tuple[Any, ...]:
    hints = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(values)
    if len(hints) != len(values):
        raise ValueError(f"{where} has {len(values)} elements, not {len(hints)}")
    return tuple(_read(hint, each, f"{where}[{n}]") for n, (hint, each) in enumerate(zip(hints, values, strict=True)))


def _of_type(kind: type[Any], value: Any, where: str) -> Any:
    """Return a value that is of a type, as JSON has it: an integer is a number too, a truth value is none."""
    if isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool)):
        return value
    wanted = {"dict": "an object", "list": "an array"}.get(kind.__name__, kind.__name__)
    raise ValueError(f"{where} is of type {type(value).__name__}, not {wanted}")
