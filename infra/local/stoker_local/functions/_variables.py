"""Environment variables of functions."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["check_variables"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VALUE = re.compile(r"[\x01-\ud7ff\ue000-\U0010ffff]*")


def check_variables(variables: Mapping[str, str], *, owner: str) -> int:
    """Return the size of the variables in bytes; errors name them and never show a value.

    Raises:
        ValueError: a process cannot have them.
    """
    size_bytes = 0
    for name, value in variables.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} in the environment of {owner} is no name: letters, digits and '_'")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise ValueError(f"{name} in the environment of {owner} is not a text that a process can have")
        size_bytes += len(name) + len(value.encode())
    return size_bytes
