"""Lazy imports: public names of a package, and plug-ins that entry points declare."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from stoker._deprecation import load_renamed
from stoker.errors import ConfigError, MissingExtraError


def plugin_names(group: str) -> tuple[str, ...]:
    """Return the names of a group's installed entry points, sorted."""
    from importlib.metadata import entry_points  # takes 20 ms, only needed with plug-ins

    return tuple(sorted(entry_points(group=group).names))


def load_plugin(group: str, name: str, what: str) -> Any:
    """Import and return the object of an entry point.

    Args:
        group: group of the entry point, such as ``stoker.tiers``.
        name: name of the entry point in the group.
        what: kind of plug-in, in the singular, for messages.

    Raises:
        ConfigError: no installed distribution declares this name.
        MissingExtraError: the entry point cannot be loaded.
    """
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group=group)}
    if name not in points:
        from stoker._base.fields import quote_value  # every process imports this module first, so it imports little

        installed = ", ".join(sorted(points)) or "none"
        raise ConfigError(
            f"there is no {what} {quote_value(name)}; installed: {installed}; "
            f"a package adds one by an entry point in the group {group}"
        )
    try:
        return points[name].load()
    except Exception as error:
        reason = f"{error}" if isinstance(error, ImportError | AttributeError) else repr(error)
        raise MissingExtraError(f"the {what} {name} ({points[name].value}) cannot be loaded: {reason}") from error


@contextmanager
def require_extra(what: str, extra: str) -> Iterator[None]:
    """Convert a ModuleNotFoundError in the block to an error that names the extra to install.

    Args:
        what: feature that needs the module, for the message.
        extra: name of the extra; if empty, the error is not converted.

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
    """Import a lazy attribute of a package, and store it in the package; for the package's ``__getattr__``.

    A deprecated name that the package has declared warns, and is not stored.

    Args:
        package: dotted name of the package.
        name: name of the attribute.
        names_of: names that each module defines, separated by blanks, by module.

    Raises:
        AttributeError: no module of the table has this name, and the package has not declared it as deprecated.
    """
    for module, names in names_of.items():
        if name in names.split():
            value = getattr(import_module(module), name)
            setattr(sys.modules[package], name, value)
            return value
    return load_renamed(package, name)
