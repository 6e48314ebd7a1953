"""The local function cloud's configuration, checked as a whole, and read from JSON.

Errors name where and what, never the value, which may be a secret.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from stoker_local._config import WELL_KNOWN, is_this_machine
from stoker_local._s3.signature import KeyPair
from stoker_local.functions._faults import FunctionFaultPlan
from stoker_local.functions._specs import (
    EventSource,
    FunctionSpec,
    GoogleSpec,
    Notification,
    ObjectFinalized,
    QueueSpec,
    Schedule,
    check_variables,
)

__all__ = ["FunctionCloudConfig"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCloudConfig:
    """What the local function cloud runs.

    Attributes:
        host: a loopback address; other machines are never let in.
        keys: who may sign requests; the first one is in :meth:`FunctionCloud.environment`.
        environment: variables that every function gets from its platform: endpoints, its role's credentials.
        notifications: from the local bucket to queues.
        sources: from queues to functions.
        finalized: from the local GCS to Google functions.
        idle_seconds: an instance without work for so long is reclaimed.
        init_seconds: a cold start that takes longer fails.
        event_retry_seconds: waits before the first and the second retry of an event. Lambda's are 60 and 120.
        tmp: ``tmpfs`` gives every instance a ``/tmp`` of its own in a private mount namespace; ``folder`` a folder in
            ``TMPDIR``, in which one file, but not all together, is limited; ``auto`` the first where the system allows.
        seed: of request ids and of duplicates in queues.
    """

    host: str = "127.0.0.1"
    port: int = 0
    region: str = "us-east-1"
    account: str = "000000000000"
    keys: tuple[KeyPair, ...] = (WELL_KNOWN,)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    functions: tuple[FunctionSpec, ...] = ()
    queues: tuple[QueueSpec, ...] = ()
    notifications: tuple[Notification, ...] = ()
    sources: tuple[EventSource, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    google: tuple[GoogleSpec, ...] = ()
    finalized: tuple[ObjectFinalized, ...] = ()
    idle_seconds: float = 300.0
    init_seconds: float = 10.0
    event_retry_seconds: tuple[float, float] = (1.0, 2.0)
    tmp: Literal["auto", "tmpfs", "folder"] = "auto"
    faults: FunctionFaultPlan = field(default_factory=FunctionFaultPlan)
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_this_machine(self.host):
            raise ValueError(f"host={self.host!r} is open to other machines; functions run only for this one")
        if not self.keys:
            raise ValueError("keys are empty: nobody could sign a request")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port} is not within [0, 65535]")
        if not (self.idle_seconds > 0 and self.init_seconds > 0 and min(self.event_retry_seconds) >= 0):
            raise ValueError(
                f"idle_seconds={self.idle_seconds} and init_seconds={self.init_seconds} must be positive, "
                f"event_retry_seconds={self.event_retry_seconds} not negative"
            )
        if self.tmp not in ("auto", "tmpfs", "folder"):
            raise ValueError(f"tmp={self.tmp!r} is not 'auto', 'tmpfs' or 'folder'")
        check_variables(self.environment, owner="every function")
        functions, google = {spec.name for spec in self.functions}, {spec.name for spec in self.google}
        _unique("function", [*(spec.name for spec in self.functions), *(spec.name for spec in self.google)])
        queues = _unique("queue", (spec.name for spec in self.queues))
        _unique("schedule", (schedule.name for schedule in self.schedules))
        _refuse_unknown("queue", queues, (q.dead_letters for q in self.queues if q.dead_letters))
        _refuse_unknown("queue", queues, (f.on_failure for f in self.functions if f.on_failure))
        _refuse_unknown("queue", queues, (n.queue for n in self.notifications))
        _refuse_unknown("queue", queues, (f.queue for f in self.finalized))
        _refuse_unknown("queue", queues, (s.queue for s in self.sources))
        _refuse_unknown("function", functions, (s.function for s in self.sources))
        _refuse_unknown("function", functions, (s.function for s in self.schedules))
        _refuse_unknown("Google function", google, (e.function for e in self.finalized))
        self._check_visibility()
        self._check_dead_letters()

    def _check_visibility(self) -> None:
        """Refuse what Lambda refuses: messages that would come back while their function may still be at work."""
        timeouts = {spec.name: spec.timeout_seconds for spec in self.functions}
        visible = {spec.name: spec.visibility_seconds for spec in self.queues}
        for source in self.sources:
            if visible[source.queue] < timeouts[source.function]:
                raise ValueError(
                    f"visibility_seconds={visible[source.queue]} of {source.queue} is less than "
                    f"timeout_seconds={timeouts[source.function]} of {source.function}"
                )

    def _check_dead_letters(self) -> None:
        following = {spec.name: spec.dead_letters for spec in self.queues}
        for name in following:
            passed, at = {name}, following[name]
            while at:
                if at in passed:
                    raise ValueError(f"the dead letters of {name} come back to {at}")
                passed.add(at)
                at = following[at]

    @classmethod
    def from_json(cls, text: str) -> FunctionCloudConfig:
        """Return the configuration that a JSON object names; what it leaves out has its default.

        Raises:
            ValueError: it is not a JSON object, has an unknown name, or a value is not valid.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the configuration is not JSON: {error}") from error
        return read_record(cls, values, where="the configuration")


def _unique(what: str, names: Iterable[str]) -> set[str]:
    counted = Counter(names)
    if repeated := [name for name, count in counted.items() if count > 1]:
        raise ValueError(f"a {what} is named twice: {', '.join(repeated)}")
    return set(counted)


def _refuse_unknown(what: str, known: set[str], names: Iterable[str]) -> None:
    if unknown := sorted(set(names) - known):
        raise ValueError(f"there is no {what} {', '.join(unknown)}; there are: {', '.join(sorted(known)) or 'none'}")


def read_record(kind: type[T], values: object, *, where: str) -> T:
    """Return a dataclass of a JSON object; what the object leaves out has its default.

    Args:
        kind: a dataclass of texts, numbers, truth values, choices, enumerations, tuples, mappings and dataclasses.
        values: what ``json.loads`` returns.
        where: names the object in errors.

    Raises:
        ValueError: a field is unknown, missing, of another type, or refused by the dataclass.
    """
    if not isinstance(values, dict):
        raise _wrong(where, values, "an object")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # mypy knows no type of dataclasses
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(
            f"{where} has a field {unknown[0]!r} that means nothing; there are: {', '.join(sorted(known))}"
        )
    if missing := [name for name, field in known.items() if name not in values and _is_needed(field)]:
        raise ValueError(f"{where} lacks the field {missing[0]!r}")
    hints = get_type_hints(kind)
    return kind(**{name: _read(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


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
        return read_record(hint, value, where=where)  # type: ignore[arg-type]  # a type, since hints are
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
