"""Configurations read from JSON, and what several of them check.

Errors of reading name where and what, never the value, which may be a secret.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from stoker._base.fields import read_record

T = TypeVar("T")


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
    return read_record(kind, values, where)
