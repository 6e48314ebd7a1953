"""What is imported when it is first used: public names of a package, and plug-ins that entry points declare."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from stoker.errors import ConfigError, MissingExtraError


def plugin_names(group: str) -> tuple[str, ...]:
    """Return the names of a group's entry points that are installed, sorted."""
    from importlib.metadata import entry_points  # takes 20 ms, which a process without plug-ins need not pay

    return tuple(sorted(entry_points(group=group).names))


def load_plugin(group: str, name: str, what: str) -> Any:
    """Import what an entry point names, and return it.

    Args:
        group: of entry points, such as ``stoker.tiers``.
        name: of the entry point in the group.
        what: kind of plug-in, in the singular, for messages.

    Raises:
        ConfigError: no installed distribution declares this name.
        MissingExtraError: the entry point cannot be loaded.
    """
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        from stoker._base.fields import shown  # this module is the first of every process, and imports next to nothing

        installed = ", ".join(sorted(found)) or "none"
        raise ConfigError(
            f"there is no {what} {shown(name)}; installed: {installed}; "
            f"a package adds one by an entry point in the group {group}"
        )
    try:
        return found[name].load()
    except Exception as error:
        reason = f"{error}" if isinstance(error, ImportError | AttributeError) else repr(error)
        raise MissingExtraError(f"the {what} {name} ({found[name].value}) cannot be loaded: {reason}") from error


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Say, of a module that is missing in this block, which extra of stoker's it comes with; of none if empty.

    Args:
        what: needs it, for the message.
        extra: of stoker's distribution.

    Raises:
        MissingExtraError: a module is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise MissingExtraError(f"{what} needs {error.name}; pip install 'stoker[{extra}]'") from error


def load_name(package: str, name: str, names_of: Mapping[str, str]) -> Any:
    """Import what a package's ``__getattr__`` is asked for, and keep it in the package.

    Args:
        package: dotted name of the package.
        name: of its attribute.
        names_of: module → the names, separated by blanks, that the package takes from it.

    Raises:
        AttributeError: no module of the table has this name.
    """
    for module, names in names_of.items():
        if name in names.split():
            value = getattr(import_module(module), name)
            setattr(sys.modules[package], name, value)
            return value
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
