"""Templates of paths: a text with ``{column}`` and ``{__id__}``, which give each sample the path of its file.

A template has no access to attributes or items of values, and values are formatted as plain numbers and strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from stoker._format.schema import Array, Column, Text
from stoker.errors import ConfigError

SAMPLES = "samples"
"""Folder of all samples, with which every template begins."""
_ID = "__id__"
_SPEC = re.compile(r"(?:[^{}]?[<>=^])?[-+ ]?0?\d{0,3}[,_]?(?:\.\d{1,2})?[bdeEfFgGosxX%]?", re.ASCII)
_PLAIN_NUMBER = re.compile(r"(?:0\d{1,3})?d?", re.ASCII)
_MAX_PATH_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class _Field:
    """A part of a template: a text, then the value of a column.

    Attributes:
        text: text before the value.
        name: name of the column, or ``__id__``; empty at the end of the template, where no value follows.
        spec: format of the value.
        classes: class names that are shown in place of their numbers, or None.
    """

    text: str
    name: str
    spec: str
    classes: tuple[str, ...] | None

    def fill(self, number: int, sample: Mapping[str, Any]) -> str:
        """Return the text and the formatted value of a sample."""
        if not self.name:
            return self.text
        value = number if self.name == _ID else sample[self.name]
        plain: int | str = value if isinstance(value, str | int) else value.item()
        if self.classes is None or isinstance(plain, str):
            return f"{self.text}{format(plain, self.spec)}"
        if not 0 <= plain < len(self.classes):
            raise ConfigError(f"class {plain} of column {self.name!r} has no name: there are {len(self.classes)} names")
        return f"{self.text}{self.classes[plain]}"


class PathTemplate:
    """A template that fits the columns of a data set.

    Attributes:
        text: the template.
        columns: names of the columns that it has.

    Args:
        text: template, such as ``samples/{label}/{__id__:08d}.jpg``.
        schema: columns of the data set.

    Raises:
        ConfigError: the text is not a template of paths below ``samples/``, or names a column that does not exist, or
            one that is neither text nor a number.
    """

    def __init__(self, text: str, schema: Mapping[str, Column]) -> None:
        if not isinstance(text, str) or not text.startswith(f"{SAMPLES}/"):
            raise ConfigError(f"template {text!r:.80} must begin with {SAMPLES}/, as in {SAMPLES}/{{__id__:08d}}")
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"template {text!r:.80} is not valid: {error}; write {{{{ and }}}} for braces") from None
        self.text = text
        self._fields = tuple(_parse_field(text, schema, *part) for part in parts)
        self.columns = tuple(dict.fromkeys(each.name for each in self._fields if each.name not in ("", _ID)))

    @property
    def numbering(self) -> tuple[str, str, str] | None:
        """Text before and after the sample's number, and its format; None if paths depend on more than the number."""
        fields = [each for each in self._fields if each.name]
        if [each.name for each in fields] != [_ID] or not _PLAIN_NUMBER.fullmatch(fields[0].spec):
            return None
        before, after = fields[0].text, "".join(each.text for each in self._fields if not each.name)
        is_path = all(map(_is_name, self.path(0, {}).split("/")))
        return (before, after, fields[0].spec) if is_path and "/" not in after else None

    def path(self, number: int, sample: Mapping[str, Any]) -> str:
        """Return the path of a sample.

        Args:
            number: number of the sample.
            sample: its values, of at least :attr:`columns`.

        Raises:
            ConfigError: no file can have this path; the message names the sample.
        """
        try:
            path = "".join([each.fill(number, sample) for each in self._fields])
        except ConfigError as error:
            raise ConfigError(f"sample {number} has no path by the template {self.text!r}: {error}") from None
        if len(path) > _MAX_PATH_CHARACTERS or not all(map(_is_name, path.split("/"))):
            raise ConfigError(
                f"sample {number} would be the file {path!r:.200}, but a path has at most {_MAX_PATH_CHARACTERS} "
                "characters, no NUL, and between its slashes neither nothing nor '.' or '..'; change the template "
                f"{self.text!r}, for example to {SAMPLES}/{{__id__:08d}}"
            )
        return path


def _parse_field(
    text: str, schema: Mapping[str, Column], before: str, name: str | None, spec: str | None, conversion: str | None
) -> _Field:
    """Return one part of a template, as :meth:`string.Formatter.parse` splits it."""
    if name is None:
        return _Field(before, "", "", None)
    where = f"template {text!r:.80}"
    usable = [each for each, column in schema.items() if _is_usable(column)]
    if name != _ID and name not in schema:
        raise ConfigError(f"{where} names {name!r:.80}, which is no column; write {_ID} or one of {', '.join(usable)}")
    if name != _ID and name not in usable:
        raise ConfigError(
            f"{where} names the column {name!r}, which is neither text nor one number a sample; "
            f"write {', '.join([_ID, *usable])}"
        )
    column = None if name == _ID else schema[name]
    classes = column.classes if isinstance(column, Array) else None
    if conversion is not None and (conversion != "c" or classes is None or spec):
        raise ConfigError(
            f"{where} has '!{conversion}' for {name!r}: '!c' shows the name of a class, without a format, and only "
            "for a column that was packed with classes="
        )
    value: Any = 0 if column is None else "" if isinstance(column, Text) else column.dtype.holder.type(0).item()
    try:
        if not _SPEC.fullmatch(spec or ""):
            raise ValueError("no such format")
        format(value, spec or "")
    except ValueError as error:
        raise ConfigError(f"{where} has the format {spec!r:.80} for {name!r}: {error}; write :08d or none") from None
    return _Field(before, name, spec or "", classes if conversion else None)


def _is_usable(column: Column) -> bool:
    """Return whether a value of a column can be a part of a path."""
    return isinstance(column, Text) or (isinstance(column, Array) and not column.shape and not column.dtype.is_bits)


def _is_name(part: str) -> bool:
    return part not in ("", ".", "..") and "\0" not in part
