"""Arguments by name: a wrong one is an error that says which to write; a constructor takes those of a config class.

A config class that is :class:`Bounded` says in the types of its fields which values they take.
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

from stoker.errors import ArgumentError, ConfigError

Class = TypeVar("Class", bound=type)
Config = TypeVar("Config")
Owner = TypeVar("Owner")
Number = TypeVar("Number", int, float)
P = ParamSpec("P")

_LIKENESS = 0.7
"""Of two names, from which one is taken for a misspelling of the other."""
_OURS = ("stoker", "stoker_torch", "stoker_warm")
"""Packages whose frames are not where a deprecated argument was written."""
_PRIVATE_PATH = re.compile(r"\b(stoker\w*)(?:\.\w+)*?\._[\w.]+(?=\.\w)")
"""Of a class in a text; its package has it, too."""


@dataclass(frozen=True, slots=True)
class MovedArgument:
    """An argument that is a field of an option object now, and still taken.

    Attributes:
        setting: argument that takes the option object.
        options: class of the object.
        field: of the object, that takes the value.
        plain: field of the object that a plain value of ``setting`` stands for.
    """

    setting: str
    options: type[Any]
    field: str
    plain: str


_SIGNS = {
    ">": ("more than", operator.gt),
    ">=": ("at least", operator.ge),
    "<": ("less than", operator.lt),
    "<=": ("at most", operator.le),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of the numbers that a field takes, beside its type: ``depth: Annotated[int, Bound(">=", 1)]``."""

    sign: Literal[">", ">=", "<", "<="]
    limit: float

    def __str__(self) -> str:
        return f"{_SIGNS[self.sign][0]} {self.limit:,}"

    def admits(self, value: object) -> bool:
        """Return whether it is such a number; NaN is none."""
        return isinstance(value, Real) and bool(_SIGNS[self.sign][1](value, self.limit))


Positive = Annotated[Number, Bound(">", 0)]
NotNegative = Annotated[Number, Bound(">=", 0)]
AtLeastOne = Annotated[Number, Bound(">=", 1)]
Fraction = Annotated[Number, Bound(">=", 0), Bound("<=", 1)]
Finite = Annotated[Number, Bound("<", float("inf"))]


class Bounded:
    """Base of config dataclasses: a field whose type has a :class:`Bound`, or is a Literal, takes no other value.

    A class with a ``__post_init__`` of its own calls this one there.

    Raises:
        ConfigError: a field has another value.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, (bounds, is_optional) in _bounded_fields(type(self)).items():  # type: ignore[arg-type]  # classes can be hashed
            value = getattr(self, name)
            if all(bound.admits(value) for bound in bounds) or (is_optional and value is None):
                continue
            wanted = " and ".join(map(str, bounds)) + (", or None" if is_optional else "")
            raise ConfigError(f"{name} must be {wanted}, not {value!r:.80}")


@dataclass(frozen=True, slots=True)
class _Choice:
    """Texts of which a field takes one."""

    texts: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.texts)}"

    def admits(self, value: object) -> bool:
        return value in self.texts


@cache
def _bounded_fields(kind: type) -> dict[str, tuple[list[Bound | _Choice], bool]]:
    """Return the fields of a class that have bounds: these, and whether None is admitted, too."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if bounds := [bound for part in parts for bound in _bounds_of(part)]:
            found[name] = bounds, NoneType in parts
    return found


def _bounds_of(hint: Any) -> list[Bound | _Choice]:
    if get_origin(hint) is Literal:
        return [_Choice(get_args(hint))]
    return [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Bound)]


def check_names(given: Iterable[str], known: Collection[str], hints: Mapping[str, str], *, owner: str) -> None:
    """Refuse arguments that do not exist.

    Args:
        given: names of the keyword arguments of a call.
        known: names that exist.
        hints: name that other libraries use → what to use instead; ``owner`` has no argument of that name.
        owner: the class that is constructed, for messages.

    Raises:
        ArgumentError: a name does not exist; says which one to use.
    """
    for name in given:
        if name in known:
            continue
        if name in hints:
            advice = f": {hints[name]}"
        elif likely := get_close_matches(name, known, n=1, cutoff=_LIKENESS):
            advice = f"; did you mean {likely[0]}=?"
        else:
            advice = f"; it takes {', '.join(known)}"
        raise ArgumentError(f"{owner} has no argument {name}={advice}")


def check_picklable(value: object, what: str) -> None:
    """Refuse what a spawned process could not get.

    Args:
        value: argument of a constructor that the user has made.
        what: names it, for messages.

    Raises:
        ConfigError: it cannot be pickled.
    """
    from multiprocessing.reduction import ForkingPickler  # takes as long to import as all of this package

    try:
        ForkingPickler.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"{what} that is handed over goes to other processes as a pickle, and {value!r:.80} makes none "
            f"({type(error).__name__}: {error}): give a URL in its place, give its class __getstate__, or use fork"
        ) from error


def explain_arguments(
    owner: str, hints: Mapping[str, str] | None = None, moved: Mapping[str, MovedArgument] | None = None
) -> Callable[[Class], Class]:
    """Return a class decorator: arguments that are unknown or missing are errors that say what to write.

    The constructor keeps its signature.

    Args:
        owner: what users call the class, for messages.
        hints: as for :func:`check_names`; default none.
        moved: deprecated argument → where its value belongs; default none.
    """

    def decorate(kind: Class) -> Class:
        construct: Callable[..., None] = kind.__init__  # type: ignore[misc]  # the class decorated is the one made
        parameters = [each for each in inspect.signature(construct).parameters.values() if each.name != "self"]
        known = [each.name for each in parameters]
        by_place = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
        required = [each.name for each in parameters if each.default is each.empty]

        @wraps(construct)
        def checked(self: object, *args: Any, **settings: Any) -> None:
            if len(args) > len(by_place):
                raise ArgumentError(f"{owner} takes {' and '.join(by_place) or 'nothing'} by place, all else by name=")
            settings = _with_moved(settings, moved or {}, owner)
            check_names(settings, known, hints or {}, owner=owner)
            if missing := [name for name in required if name not in settings and name not in by_place[: len(args)]]:
                raise ArgumentError(f"{owner} needs the argument {missing[0]}=")
            construct(self, *args, **settings)

        kind.__init__ = checked  # type: ignore[misc]  # as above
        return kind

    return decorate


def _with_moved(settings: dict[str, Any], moved: Mapping[str, MovedArgument], owner: str) -> dict[str, Any]:
    """Return arguments with those that moved in their option objects; warns of each.

    Raises:
        ArgumentError: one is given beside the option object that it belongs to.
    """
    fields: dict[str, dict[str, Any]] = {}
    for name in settings.keys() & moved.keys():
        place, value = moved[name], settings.pop(name)
        write = f"{place.setting}={place.options.__name__}({place.field}=…)"
        if isinstance(settings.get(place.setting), place.options):
            raise ArgumentError(f"{owner} is given {name}= beside {place.setting}=: write {write}")
        warnings.warn(f"{owner}({name}=…) is deprecated: write {write}", DeprecationWarning, stacklevel=caller_level())
        fields.setdefault(place.setting, {})[place.field] = value
    for place in moved.values():
        if place.setting in fields:
            plain = {place.plain: settings[place.setting]} if place.setting in settings else {}
            settings[place.setting] = place.options(**fields.pop(place.setting), **plain)
    return settings


def caller_level() -> int:
    """Return the ``stacklevel`` of the first caller outside this program, as the function that calls this sees it."""
    level, frame = 0, inspect.currentframe()  # from Python 3.12 on, warnings can skip packages by themselves
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level


class _PublicSignature(inspect.Signature):
    """A signature whose text names our types as users import them, and an object with all its defaults by its class."""

    def __str__(self) -> str:
        text = super().__str__()
        for default in (each.default for each in self.parameters.values()):
            if is_dataclass(default) and not isinstance(default, type) and default == type(default)():
                text = text.replace(repr(default), f"{type(default).__name__}()")
        return _PRIVATE_PATH.sub(r"\1", text)


def takes_settings(
    config: Callable[P, Config],
) -> Callable[[Callable[[Owner, Config], None]], Callable[Concatenate[Owner, P], None]]:
    """Return a decorator: a constructor of a config object becomes one that takes the arguments of its class.

    So each setting has its name, type, default and description at one place, and a type checker, an editor and
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
        construct_from.__module__, construct_from.__doc__ = construct.__module__, _described(config)
        construct_from.__annotations__ = {each.name: types[each.name] for each in given} | {"return": None}
        construct_from.__signature__ = _PublicSignature(parameters)  # type: ignore[attr-defined]  # functions have it
        return construct_from

    return decorate


def _described(config: object) -> str:
    """Return the descriptions of the attributes of a config class and its bases as those of arguments."""
    bases = config.__mro__ if isinstance(config, type) else ()
    texts = [inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2] for base in reversed(bases)]
    arguments = "\n".join(text.partition("\n\n")[0] for text in texts if text)
    return f"Take the settings by name.\n\nArgs:\n{arguments}"  # a first line, so that tools keep the indentation
