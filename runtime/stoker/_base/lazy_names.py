"""Public names of a package that are imported when they are first used, so that importing the package costs little."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

__all__ = ["load_name"]


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
