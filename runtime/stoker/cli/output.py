"""The output of commands: readable values, tables, JSON, and the cost of requests.

Control characters are escaped, because text from a bucket may contain any bytes.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from stoker._base.fields import make_printable
from stoker._base.sizes import format_count, format_dollars
from stoker._cost.prices import Prices
from stoker._format.display import describe_type
from stoker._format.schema import Array, Bytes, Column, Text
from stoker._maintenance.inspection import BadObject
from stoker._stores.object_store import ObjectStore, with_meter
from stoker.abc import Sample, Source, Store
from stoker.errors import ConfigError

__all__ = [
    "RequestCosts",
    "format_bad_object",
    "format_count",
    "describe",
    "json_text",
    "json_value",
    "preview",
    "make_printable",
    "format_sample",
    "say",
    "table",
]

_MAX_SHOWN_CHARACTERS = 60
_MAX_SHOWN_BYTES = 16
_MAX_SHOWN_VALUES = 6
_MAX_SHOWN_CLASSES = 5


def json_text(document: object) -> str:
    """Return a document as JSON; infinity and NaN, which JSON lacks, become ``null``."""
    return json.dumps(_replace_non_finite(document), indent=2, allow_nan=False)


def _replace_non_finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def quote_start(text: str) -> str:
    """Return the first 60 characters of a text, printable and in quotes."""
    rest = len(text) - _MAX_SHOWN_CHARACTERS
    return f'"{make_printable(text[:_MAX_SHOWN_CHARACTERS])}"' + (f"… and {rest:,} more" if rest > 0 else "")


def say(args: Namespace, *lines: str) -> None:
    """Write lines to standard error, unless ``--quiet`` is given."""
    if not args.quiet:
        for line in lines:
            print(make_printable(line), file=sys.stderr)


def table(rows: Sequence[Sequence[str]], indent: str = "  ", right: Collection[int] = ()) -> str:
    """Return rows as lines with aligned columns.

    Args:
        rows: cells of each row.
        indent: start of each line.
        right: indices of the columns to align to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = [">" if number in right else "<" for number in range(len(widths))]
    form = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join(indent + form.format(*row).rstrip() for row in rows)


def format_bad_object(bad: BadObject) -> str:
    """Return an object's key and its problem, without repeating the key."""
    return f"{bad.key}: {bad.problem.removeprefix(f'{bad.key} ')}"


def describe(column: Column) -> str:
    """Return a column's type and the first of its classes."""
    text = describe_type(column)
    if isinstance(column, Array) and column.classes is not None:
        names = ", ".join(map(make_printable, column.classes[:_MAX_SHOWN_CLASSES]))
        count = format_count(len(column.classes), "class", "classes")
        text += f", {count}: {names}" + (", …" if len(column.classes) > _MAX_SHOWN_CLASSES else "")
    return text


def preview(column: Column, value: Any) -> str:
    """Return a value as one line."""
    if isinstance(column, Text):
        return quote_start(value)
    if isinstance(column, Bytes):
        more = "…" if len(value) > _MAX_SHOWN_BYTES else ""
        return format_count(len(value), "byte") + (f": {value[:_MAX_SHOWN_BYTES].hex(' ')}{more}" if value else "")
    array = np.asarray(value)
    kind = column.dtype.name + (f"{list(array.shape)}" if array.ndim else "")
    if column.dtype.is_bits:
        return f"{kind}, bits {' '.join(f'{bits:x}' for bits in array.flat[:_MAX_SHOWN_VALUES])}"
    if array.size > _MAX_SHOWN_VALUES:
        return f"{kind}, {array.min():.6g} to {array.max():.6g}, mean {array.mean(dtype='f8'):.6g}"
    if array.ndim:
        return f"{kind}: {' '.join(str(item) for item in array.ravel())}"
    return f"{array}{_class_name(column, int(array)) if array.dtype.kind in 'iu' else ''}"


def json_value(column: Column, value: Any) -> Any:
    """Return a value for JSON: large arrays as statistics, and bytes as their number and the first of them."""
    if isinstance(column, Text):
        return value
    if isinstance(column, Bytes):
        return {"size_bytes": len(value), "first_bytes": value[:_MAX_SHOWN_BYTES].hex()}
    array = np.asarray(value)
    if array.size <= _MAX_SHOWN_VALUES:
        return array.tolist()
    facts: dict[str, Any] = {"dtype": column.dtype.name, "shape": list(array.shape)}
    if not column.dtype.is_bits:
        facts |= {"min": array.min().item(), "max": array.max().item(), "mean": array.mean(dtype="f8").item()}
    return facts


def format_sample(source: Source, number: int, first: Sample | None) -> list[str]:
    """Return a sample of a source as lines for the user to check, none if there is no sample.

    Args:
        source: source of the sample.
        number: index of the sample.
        first: the sample, None if there is none.
    """
    if first is None:
        return []
    where, sample = first
    rows = [(name, preview(source.schema[name], value)) for name, value in sample.items()]
    return [f"sample {number} ({where}):", *table(rows).splitlines()]


def _class_name(column: Column, number: int) -> str:
    classes = column.classes if isinstance(column, Array) else None
    return f" ({make_printable(classes[number])})" if classes is not None and 0 <= number < len(classes) else ""


class RequestCosts:
    """Counts the requests to stores, and their cost.

    Raises:
        ConfigError: the price file is invalid.
    """

    def __init__(self) -> None:
        self._prices = Prices.load()
        self._stores: list[ObjectStore] = []

    def add_store(self, store: Store) -> ObjectStore:
        """Return the store, wrapped to count its requests."""
        self._stores.append(with_meter(store))
        return self._stores[-1]

    def summary(self) -> str:
        """Return ``12 requests to stores (10 GET, 2 LIST), $0.000054``, without a price if they are free."""
        counts, dollars = self.to_dict().values()
        each = ", ".join(f"{count:,} {operation.upper()}" for operation, count in counts.items())
        price = f", {format_dollars(dollars)}" if dollars else ""
        return f"{format_count(sum(counts.values()), 'request')} to stores{f' ({each})' if each else ''}{price}"

    def to_dict(self) -> dict[str, Any]:
        """Return ``requests`` by operation, and ``dollars`` for them and their traffic within the region."""
        counts, dollars = Counter[str](), 0.0
        for store in self._stores:
            reading = store.meter.snapshot()
            counts.update({str(operation): count for operation, count in reading.requests.items()})
            with suppress(ConfigError):  # the price list does not have this store
                dollars += self._prices.dollars(reading)
        return {"requests": dict(+counts), "dollars": dollars}
