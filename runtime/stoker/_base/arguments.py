"""Validation of constructor arguments: helpful errors, deprecated names, bounds, and arguments from a config class.

A config class derived from :class:`BoundedConfig` declares the bounds of its fields in their types.
"""

from __future__ import annotations

import inspect
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from stoker._deprecation import alias_attributes, caller_stacklevel, declare_renamed, warn_renamed
from stoker.errors import ArgumentError, ConfigError

Class = TypeVar("Class", bound=type)
Config = TypeVar("Config")
Owner = TypeVar("Owner")
Number = TypeVar("Number", int, float)
P = ParamSpec("P")
Result = TypeVar("Result")

_SIMILARITY_CUTOFF = 0.7
"""Similarity of two names from which an error suggests one for the other."""
_PRIVATE_PATH = re.compile(r"\b(stoker\w*)(?:\.\w+)*?\._[\w.]+(?=\.\w)")
"""Private module path of a class in a text; the class is public in its top-level package."""
_DESCRIPTION = re.compile(r"^    (\w+): .*(?:\n     .*)*", re.MULTILINE)
"""Description of one argument in a section of a docstring, with its continuation lines."""


@dataclass(frozen=True, slots=True)
class MovedArgument:
    """A deprecated argument that is now a field of an option object.

    Attributes:
        setting: name of the argument that takes the option object.
        options: class of the option object.
        field: name of the option object's field for the value.
        default_field: name of the option object's field for a value of ``setting`` that is not an option object.
    """

    setting: str
    options: type[Any]
    field: str
    default_field: str


_COMPARISONS = {
    ">": ("more than", operator.gt),
    ">=": ("at least", operator.ge),
    "<": ("less than", operator.lt),
    "<=": ("at most", operator.le),
}


@dataclass(frozen=True, slots=True)
class NumberBound:
    """A bound of a numeric field, as an annotation: ``depth: Annotated[int, Bound(">=", 1)]``."""

    sign: Literal[">", ">=", "<", "<="]
    limit: float

    def __str__(self) -> str:
        return f"{_COMPARISONS[self.sign][0]} {self.limit:,}"

    def admits(self, value: object) -> bool:
        """Return whether a value is a number within the bound; NaN is not."""
        return isinstance(value, Real) and bool(_COMPARISONS[self.sign][1](value, self.limit))


Positive = Annotated[Number, NumberBound(">", 0)]
NotNegative = Annotated[Number, NumberBound(">=", 0)]
AtLeastOne = Annotated[Number, NumberBound(">=", 1)]
Fraction = Annotated[Number, NumberBound(">=", 0), NumberBound("<=", 1)]
Finite = Annotated[Number, NumberBound("<", float("inf"))]


class BoundedConfig:
    """Base class of config dataclasses; validates fields whose type has a :class:`NumberBound` or is a Literal.

    A subclass with its own ``__post_init__`` must call this one.

    Raises:
        ConfigError: the value of a field is not allowed.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, (bounds, is_optional) in _fields_with_bounds(type(self)).items():  # type: ignore[arg-type]  # classes can be hashed
            value = getattr(self, name)
            if all(bound.admits(value) for bound in bounds) or (is_optional and value is None):
                continue
            expected = " and ".join(map(str, bounds)) + (", or None" if is_optional else "")
            raise ConfigError(f"{name} must be {expected}, not {value!r:.80}")


@dataclass(frozen=True, slots=True)
class _Choice:
    """The values of a Literal field."""

    texts: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.texts)}"

    def admits(self, value: object) -> bool:
        return value in self.texts


@cache
def _fields_with_bounds(kind: type) -> dict[str, tuple[list[NumberBound | _Choice], bool]]:
    """Return the bounds of each field of a class that has some, and whether the field allows None."""
    bounds_by_field = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if bounds := [bound for part in parts for bound in _bounds_of(part)]:
            bounds_by_field[name] = bounds, NoneType in parts
    return bounds_by_field


def _bounds_of(hint: Any) -> list[NumberBound | _Choice]:
    if get_origin(hint) is Literal:
        return [_Choice(get_args(hint))]
    return [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, NumberBound)]


def check_names(given: Iterable[str], known_names: Collection[str], hints: Mapping[str, str], *, owner: str) -> None:
    """Reject unknown keyword arguments.

    Args:
        given: names of the keyword arguments of a call.
        known_names: names of the existing arguments.
        hints: advice for names that other libraries use, by name; none is an argument of ``owner``.
        owner: name of the class that is constructed, for messages.

    Raises:
        ArgumentError: a name does not exist; the message says which to use.
    """
    for name in given:
        if name in known_names:
            continue
        if name in hints:
            advice = f"; {hints[name]}"
        elif likely := get_close_matches(name, known_names, n=1, cutoff=_SIMILARITY_CUTOFF):
            advice = f"; did you mean {likely[0]}=?"
        else:
            advice = f"; it takes {', '.join(known_names)}"
        raise ArgumentError(f"{owner} has no argument {name}={advice}")


def check_picklable(value: object, what: str) -> None:
    """Reject a value that cannot be sent to a spawned process.

    Args:
        value: object that the user passed to a constructor.
        what: description of the object, for messages.

    Raises:
        ConfigError: the value cannot be pickled.
    """
    from multiprocessing.reduction import ForkingPickler  # its import takes as long as that of this package

    try:
        ForkingPickler.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"{what} is pickled for other processes, and {value!r:.80} cannot be pickled "
            f"({type(error).__name__}: {error}): give a URL instead, give its class __getstate__, or use fork"
        ) from error


def explain_arguments(
    owner: str,
    hints: Mapping[str, str] | None = None,
    moved: Mapping[str, MovedArgument] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Callable[[Class], Class]:
    """Return a class decorator that explains unknown and missing arguments in errors.

    The constructor keeps its signature.

    Args:
        owner: public name of the class, for messages.
        hints: advice by argument name, as for :func:`check_names`; default none.
        moved: new place of each deprecated argument, by name; default none.
        renamed: present name of each deprecated argument, by name; default none. A dataclass gets a deprecated property
            for each, because its arguments are its fields.
    """

    def decorate(kind: Class) -> Class:
        construct: Callable[..., None] = kind.__init__  # type: ignore[misc]  # the class itself, not a subclass
        known = {name: each for name, each in inspect.signature(construct).parameters.items() if name != "self"}
        by_place = [name for name, each in known.items() if each.kind == each.POSITIONAL_OR_KEYWORD]
        required = [name for name, each in known.items() if each.default is each.empty]

        @wraps(construct)
        def checked(self: object, *args: Any, **settings: Any) -> None:
            if len(args) > len(by_place):
                places = " and ".join(by_place) or "no argument"
                raise ArgumentError(f"{owner} takes only {places} by position; pass the other arguments by name")
            if not settings.keys() <= known.keys():
                settings = _rename_arguments(settings, renamed or {}, owner, given=by_place[: len(args)])
                settings = _move_arguments(settings, moved or {}, owner)
                check_names(settings, known, hints or {}, owner=owner)
            if missing := [name for name in required if name not in settings and name not in by_place[: len(args)]]:
                raise ArgumentError(f"{owner} needs the argument {missing[0]}=")
            construct(self, *args, **settings)

        kind.__init__ = checked  # type: ignore[misc]  # as above
        if renamed and is_dataclass(kind):
            return alias_attributes(owner, renamed)(kind)
        declare_renamed(owner, renamed or {})
        return kind

    return decorate


def rename_arguments(owner: str, renamed: Mapping[str, str]) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Return a decorator for a function whose keyword arguments have deprecated names; it keeps its signature.

    Args:
        owner: public name of the function, for messages.
        renamed: present name of each deprecated argument, by name.
    """
    declare_renamed(owner, renamed)

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        names = list(inspect.signature(function).parameters)

        @wraps(function)
        def renaming(*args: P.args, **settings: P.kwargs) -> Result:
            return function(*args, **_rename_arguments(settings, renamed, owner, given=names[: len(args)]))

        return renaming

    return decorate


def _rename_arguments(
    settings: dict[str, Any], renamed: Mapping[str, str], owner: str, *, given: Collection[str]
) -> dict[str, Any]:
    """Return keyword arguments by their present names, with a warning for each deprecated one.

    Args:
        settings: keyword arguments of a call.
        renamed: present name by deprecated name.
        owner: public name of the class or function, for messages.
        given: names of the arguments that are given by position.

    Raises:
        ArgumentError: an argument is given by both names.
    """
    for old in [name for name in settings if name in renamed]:
        new = renamed[old]
        if new in settings or new in given:
            raise ArgumentError(
                f"{owner} got {old}=, the deprecated name of {new}=, and {new}= itself; leave {old}= out"
            )
        warn_renamed(f"{owner}({old}=…)", f"{new}=")
        settings = {new if name == old else name: value for name, value in settings.items()}
    return settings


def _move_arguments(settings: dict[str, Any], moved: Mapping[str, MovedArgument], owner: str) -> dict[str, Any]:
    """Move deprecated arguments into their option objects, with a warning for each.

    Raises:
        ArgumentError: a deprecated argument is given together with its option object.
    """
    fields: dict[str, dict[str, Any]] = {}
    for name in settings.keys() & moved.keys():
        place, value = moved[name], settings.pop(name)
        write = f"{place.setting}={place.options.__name__}({place.field}=…)"
        if isinstance(settings.get(place.setting), place.options):
            raise ArgumentError(f"{owner} got both {name}= and {place.setting}=; write {write}")
        warnings.warn(
            f"{owner}({name}=…) is deprecated: write {write}", DeprecationWarning, stacklevel=caller_stacklevel()
        )
        fields.setdefault(place.setting, {})[place.field] = value
    for place in moved.values():
        if place.setting in fields:
            plain = {place.default_field: settings[place.setting]} if place.setting in settings else {}
            settings[place.setting] = place.options(**fields.pop(place.setting), **plain)
    return settings


class _PublicSignature(inspect.Signature):
    """A signature whose text has the public paths of types, and the class name for an object with default values."""

    def __str__(self) -> str:
        text = super().__str__()
        for default in (each.default for each in self.parameters.values()):
            if is_dataclass(default) and not isinstance(default, type) and default == type(default)():
                text = text.replace(repr(default), f"{type(default).__name__}()")
        return _PRIVATE_PATH.sub(r"\1", text)


def takes_settings(
    config: Callable[P, Config],
) -> Callable[[Callable[[Owner, Config], None]], Callable[Concatenate[Owner, P], None]]:
    """Return a decorator for a constructor with a config argument, which then takes the config's fields instead.

    Each setting has its name, type, default and description in one place, while type checkers, editors and
    :func:`inspect.signature` show them all.

    Args:
        config: class of the config object.
    """

    def decorate(construct: Callable[[Owner, Config], None]) -> Callable[Concatenate[Owner, P], None]:
        def construct_from(self: Owner, /, *args: P.args, **settings: P.kwargs) -> None:
            construct(self, config(*args, **settings))

        types = get_type_hints(config)
        given = inspect.signature(config).parameters.values()
        parameters = [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            *(each.replace(annotation=types[each.name]) for each in given),
        ]
        construct_from.__name__, construct_from.__qualname__ = construct.__name__, construct.__qualname__
        construct_from.__module__, construct_from.__doc__ = construct.__module__, _describe_arguments(config)
        construct_from.__annotations__ = {each.name: types[each.name] for each in given} | {"return": None}
        construct_from.__signature__ = _PublicSignature(parameters)  # type: ignore[attr-defined]  # functions have it
        return construct_from

    return decorate


def _describe_arguments(config: Callable[..., object]) -> str:
    """Return the attribute descriptions of a config class and its bases as an ``Args:`` section, in their order."""
    bases = config.__mro__ if isinstance(config, type) else ()
    sections = [inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2] for base in bases]
    texts = {found[1]: found[0] for text in sections for found in _DESCRIPTION.finditer(text.partition("\n\n")[0])}
    arguments = "\n".join(texts[name] for name in inspect.signature(config).parameters if name in texts)
    return f"Take the settings by name.\n\nArgs:\n{arguments}"  # a first line, so that tools keep the indentation
