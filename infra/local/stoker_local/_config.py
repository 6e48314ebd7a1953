"""The local bucket's configuration, and how configurations are read from JSON.

Errors of reading name where and what, never the value, which may be a secret.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from stoker_local._network import FaultPlan, Shape
from stoker_local._s3.model import BucketSpec
from stoker_local._s3.signature import KeyPair

T = TypeVar("T")

PORTS = (0, 65535)
_TOO_LITTLE: Mapping[float | None, str] = {None: "is not positive", 0: "is negative"}
WELL_KNOWN = KeyPair(access_key="stoker", secret_key="stoker-secret")  # noqa: S106  (not a secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """What the local bucket serves, to whom, how fast and how badly.

    Attributes:
        host: address to listen on. Beyond this machine, nobody is let in without a key that is not well known.
        port: 0 takes a free one.
        region: the endpoint's, and that of buckets which name none.
        keys: who may sign requests; the first one is in :meth:`LocalBucket.environment`.
        buckets: that exist from the start.
        max_object_bytes: a longer request body is refused.
        max_connections: one more is dropped.
        request_seconds: a connection ends if its next request has not arrived whole after so long.
    """

    host: str = "127.0.0.1"
    port: int = 0
    region: str = "us-east-1"
    keys: tuple[KeyPair, ...] = (WELL_KNOWN,)
    buckets: tuple[BucketSpec, ...] = (BucketSpec(name="stoker"),)
    shape: Shape = field(default_factory=Shape)
    faults: FaultPlan = field(default_factory=FaultPlan)
    max_object_bytes: int = 1 << 30
    max_connections: int = 1024
    request_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_fields(
            self, port=PORTS, max_object_bytes=(0, None), max_connections=(1, None), request_seconds=(None, None)
        )
        if not is_this_machine(self.host) and any(key.secret_key == WELL_KNOWN.secret_key for key in self.keys):
            raise ValueError(f"host={self.host!r} is open to other machines; give keys of your own")
        if not is_this_machine(self.host) and any(bucket.anonymous for bucket in self.buckets):
            raise ValueError(f"host={self.host!r} is open to other machines; an anonymous bucket would be public")
        unique_names("access key", (key.access_key for key in self.keys))
        unique_names("bucket", (bucket.name for bucket in self.buckets))

    def to_json(self) -> str:
        """Return it as one line of JSON, secrets included: for a pipe, not for a log."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BucketConfig:
        """Return what :meth:`to_json` wrote."""
        return read_json(cls, text, where="the configuration")


def is_this_machine(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``; any name but localhost might lead elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_fields(record: Any, **bounds: tuple[float | None, float | None]) -> None:
    """Refuse a dataclass with a number out of its bounds or a text that is none of its annotation's choices.

    Args:
        record: it; its ``name``, if it has one, stands in the error.
        bounds: field → least and most; a least of None is all above zero, a most of None has no end.

    Raises:
        ValueError: says which field, its value and what it may be.
    """
    for name, hint in get_type_hints(type(record)).items():
        value, choices = getattr(record, name), get_args(hint) if get_origin(hint) is Literal else ()
        least, most = bounds.get(name, (-math.inf, None))
        if choices and value not in choices:
            wrong = f"is not one of {', '.join(map(repr, choices))}"
        elif name in bounds and not ((value > 0 if least is None else value >= least) and value <= (most or math.inf)):
            lower = "(0" if least is None else f"[{least}"
            wrong = (
                _TOO_LITTLE.get(least, f"is less than {least}") if most is None else f"is not within {lower}, {most}]"
            )
        else:
            continue
        of = f" of {record.name}" if hasattr(record, "name") else ""
        raise ValueError(f"{name}={value!r}{of} {wrong}")


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


def _read_record(kind: type[T], values: object, where: str) -> T:
    if not isinstance(values, dict):
        raise _wrong(where, values, "an object")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # mypy knows no type of dataclasses
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(
            f"{where} has a field {unknown[0]!r} that means nothing; there are: {', '.join(sorted(known))}"
        )
    needed = [each.name for each in known.values() if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{where} lacks the field {missing[0]!r}")
    hints = get_type_hints(kind)
    return kind(**{name: _read(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _read(hint: Any, value: Any, where: str) -> Any:
    """Return a value as its annotation has it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:  # something or None
        return None if value is None else _read(arguments[0], value, where)
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is Mapping:
        return _mapping(arguments, value, where)
    if is_dataclass(hint):
        return _read_record(hint, value, where)  # type: ignore[arg-type]  # a type, since hints are
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        return _choice(hint, arguments, value, where)
    wanted = (int, float) if hint is float else (object if hint is Any else hint)
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint in (int, float)):
        raise _wrong(where, value, hint.__name__)
    return value


def _tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(where, value, "an array")
    hints = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(value)
    if len(hints) != len(value):
        raise ValueError(f"{where} has {len(value)} elements, not {len(hints)}")
    return tuple(_read(hint, each, f"{where}[{n}]") for n, (hint, each) in enumerate(zip(hints, value, strict=True)))


def _mapping(arguments: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    key_hint, value_hint = arguments
    return {
        _read(key_hint, name, f"a name in {where}"): _read(value_hint, each, f"{where}.{name}")
        for name, each in value.items()
    }


def _choice(hint: Any, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    choices = arguments or tuple(each.value for each in hint)
    if value not in choices:
        raise ValueError(f"{where} is not one of {', '.join(map(repr, choices))}")
    return value if arguments else hint(value)


def _wrong(where: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"{where} is of type {type(value).__name__}, not {wanted}")
