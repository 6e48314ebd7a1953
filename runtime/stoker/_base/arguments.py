"""Arguments with a wrong name: the error says which one was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from stoker.errors import ArgumentError

__all__ = ["check_names", "explain_arguments"]

Class = TypeVar("Class", bound=type)

_LIKENESS = 0.7
"""Of two names, from which one is taken for a misspelling of the other."""


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
            raise ArgumentError(f"{owner} has no argument {name}=: {hints[name]}")
        likely = get_close_matches(name, known, n=1, cutoff=_LIKENESS)
        if likely:
            raise ArgumentError(f"{owner} has no argument {name}=; did you mean {likely[0]}=?")
        raise ArgumentError(f"{owner} has no argument {name}=; it takes {', '.join(known)}")


def explain_arguments(owner: str, hints: Mapping[str, str] | None = None) -> Callable[[Class], Class]:
    """Return a class decorator: keyword arguments that are unknown or missing are errors that say what to write.

    The constructor keeps its signature.

    Args:
        owner: what users call the class, for messages.
        hints: as for :func:`check_names`; default none.
    """

    def decorate(kind: Class) -> Class:
        construct: Callable[..., None] = kind.__init__  # type: ignore[misc]  # the class decorated is the one made
        parameters = inspect.signature(construct).parameters
        known = [name for name in parameters if name != "self"]
        required = [
            each.name for each in parameters.values() if each.kind == each.KEYWORD_ONLY and each.default is each.empty
        ]

        @wraps(construct)
        def checked(self: object, *args: Any, **settings: Any) -> None:
            check_names(settings, known, hints or {}, owner=owner)
            if missing := [name for name in required if name not in settings]:
                raise ArgumentError(f"{owner} needs the argument {missing[0]}=")
            construct(self, *args, **settings)

        kind.__init__ = checked  # type: ignore[misc]  # as above
        return kind

    return decorate
