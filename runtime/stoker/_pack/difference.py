"""Saying how two schemas differ, briefly however many columns and classes they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from stoker._format.schema import Column, Schema

__all__ = ["schema_difference"]

_SHOWN_ITEMS = 5
_SHOWN_CHARACTERS = 60


def schema_difference(there: Schema, given: Schema) -> str:
    """Return, in one line, how the schema ``given`` differs from that of the data set; empty if it does not."""
    return _listed(_differences(there, given))


def _differences(there: Schema, given: Schema) -> Iterator[str]:
    yield from (f"no column {name!r}" for name in there if name not in given)
    yield from (f"an unknown column {name!r}" for name in given if name not in there)
    for name in there:
        if name in given and there[name] != given[name]:
            yield f"column {name!r} {_difference(there[name], given[name])}"
    if there.keys() == given.keys() and list(there) != list(given):
        yield f"the columns in the order {_listed(given)}, not {_listed(there)}"


def _difference(there: Column, given: Column) -> str:
    theirs, ours = there.to_json(), given.to_json()
    their_classes, our_classes = theirs.pop("classes", None), ours.pop("classes", None)
    if theirs != ours:
        return f"as {_described(given)}, not {_described(there)}"
    if their_classes is None or our_classes is None:
        return f"{'without' if our_classes is None else 'with'} names of its classes"
    pairs = enumerate(zip_longest(our_classes, their_classes))
    number, (our_name, their_name) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    return (
        f"with {len(our_classes):,} classes, not {len(their_classes):,}, of which number {number} is the first to "
        f"differ: {_shown(our_name)}, not {_shown(their_name)}"
    )


def _described(column: Column) -> str:
    words = column.to_json()
    return " ".join([words["kind"], *(str(words[key]) for key in ("dtype", "shape") if key in words)])


def _shown(name: str | None) -> str:
    return "none" if name is None else repr(name[:_SHOWN_CHARACTERS])


def _listed(items: Iterable[str]) -> str:
    every = list(items)
    more = f" and {len(every) - _SHOWN_ITEMS:,} more" if len(every) > _SHOWN_ITEMS else ""
    return ", ".join(every[:_SHOWN_ITEMS]) + more
