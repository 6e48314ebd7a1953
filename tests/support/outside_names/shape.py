"""The shape of a JSON document: the path of each value in it, and the value's type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["shape"]

_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}


def shape(path: str, value: object) -> Iterator[str]:
    """Return a line for each value in a document; all elements of a list have one path."""
    if isinstance(value, Mapping):
        if not value:
            yield f"{path}: object"
        for name, each in value.items():
            yield from shape(f"{path}.{name}", each)
    elif isinstance(value, list | tuple):
        if not value:
            yield f"{path}: array"
        for each in value:
            yield from shape(f"{path}[]", each)
    else:
        yield f"{path}: {_TYPES[type(value)]}"
