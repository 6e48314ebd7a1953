"""Representations of objects for terminals and notebooks: a line, a text table, an HTML table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any

from stoker._base.sizes import format_bytes, format_count
from stoker._format.manifest import Manifest
from stoker._format.schema import Bytes, Column

TableRows = Sequence[tuple[str, str]]
"""Rows of a table, each a name and a value."""

_MAX_COLUMNS = 6


def text_table(title: str, rows: TableRows) -> str:
    """Return a text table: the title, then one line per row, with aligned values."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)])


def html_table(title: str, rows: TableRows) -> str:
    """Return an HTML table for a notebook; all text is escaped."""
    cells = "".join(
        f'<tr><th style="text-align: left">{escape(name.strip())}</th>'
        f'<td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{cells}</tbody></table>"


def describe_columns(columns: Mapping[str, Column]) -> str:
    """Return names, types and shapes of columns, such as ``image: uint8[32, 32, 3], caption: text``."""
    columns_text = [f"{name}: {describe_type(column)}" for name, column in list(columns.items())[:_MAX_COLUMNS]]
    rest = len(columns) - len(columns_text)
    return ", ".join([*columns_text, f"and {format_count(rest, 'more column')}"] if rest else columns_text)


def describe_type(column: Column) -> str:
    """Return type and shape of one value of a column, such as ``uint8[32, 32, 3]``, ``uint16[any]`` or ``text``."""
    if isinstance(column, Bytes):  # Text too
        return column.kind
    shape = ([] if column.is_fixed else ["any"]) + list(map(str, column.shape))
    return column.dtype.name + (f"[{', '.join(shape)}]" if shape else "")


def describe_manifest(manifest: Manifest, columns: Mapping[str, Column]) -> str:
    """Return the size of a data set and the columns that are read, as a line of text."""
    return (
        f"{format_count(manifest.samples, 'sample')} ({describe_columns(columns)}) in "
        f"{format_count(len(manifest), 'super-sample')}, {format_bytes(manifest.size_bytes)}"
    )


PLAIN_KEY = "plain key"
"""Key in the metadata of a dataclass's field: the field's key for :func:`to_plain`, if that is not its name."""


def to_plain(value: Any) -> Any:
    """Convert a value to dictionaries, lists, strings and numbers, for JSON; properties are omitted."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.metadata.get(PLAIN_KEY, each.name): to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return str(value) if isinstance(value, str) else value
