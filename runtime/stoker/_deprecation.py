"""Deprecated names: aliases that warn, and work for one release.

The module or class that has deprecated names declares them; :data:`RENAMED` collects those of all imported modules.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

RENAMED: dict[str, dict[str, str]] = {}
"""Module (``stoker.errors``), class (``FetchConfig``) or function → deprecated name → present name."""

_OWN_PACKAGES = ("stoker", "stoker_torch", "stoker_warm", "stoker_sim", "stoker_functions", "stoker_local")
"""Own packages, whose frames are skipped to find the caller that wrote a deprecated name."""


def declare_renamed(owner: str, renamed: Mapping[str, str]) -> None:
    """Add deprecated names to :data:`RENAMED`.

    Args:
        owner: dotted name of a module, or public name of a class or function.
        renamed: present name by deprecated name.
    """
    if renamed:
        RENAMED.setdefault(owner, {}).update(renamed)


def load_renamed(module: str, name: str) -> Any:
    """Return the object that a deprecated name of a module stands for, with a warning; for its ``__getattr__``.

    Raises:
        AttributeError: the module has declared no such name.
    """
    new = RENAMED.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_renamed(f"{module}.{name}", new)
    return getattr(sys.modules[module], new)


def alias_attributes(owner: str, renamed: Mapping[str, str]) -> Callable[[Class], Class]:
    """Return a class decorator that adds read-only properties for renamed attributes and methods.

    Args:
        owner: public name of the class.
        renamed: present name by deprecated name.
    """

    def decorate(kind: Class) -> Class:
        declare_renamed(owner, renamed)
        for old, new in renamed.items():
            setattr(kind, old, _create_property(f"{owner}.{old}", new))
        return kind

    return decorate


def _create_property(old: str, new: str) -> property:
    def read(self: object) -> Any:
        warn_renamed(old, new)
        return getattr(self, new)

    return property(read, doc=f"Deprecated name of ``{new}``.")


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller outside our packages that a name is deprecated.

    Args:
        old: deprecated name, as the caller wrote it.
        new: text to write instead.
    """
    warnings.warn(f"{old} is deprecated: write {new}", DeprecationWarning, stacklevel=caller_stacklevel())


def caller_stacklevel() -> int:
    """Return the ``stacklevel`` of the first frame outside our packages, for a warning by this function's caller."""
    import inspect  # takes as long as this whole package, and few programs have a deprecated name

    level, frame = 0, inspect.currentframe()  # from Python 3.12 on, warnings.warn can skip packages itself
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN_PACKAGES:
        level, frame = level + 1, frame.f_back
    return level
