"""Reads a list of JSON values one after the other, so that a file of any size takes the memory of one of them."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from stoker.errors import ConfigError

__all__ = ["read_values"]

_CHUNK_BYTES = 64 << 10
_MOST_CHARACTERS = 1 << 20
"""Of a value. The largest that stoker writes, a fetch whose path has hundreds of spans, has a thirtieth of it."""
_GZIP = b"\x1f\x8b"
_BETWEEN = re.compile(r"[\s,]*")
_LIST_OF_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_LONGEST_PART = len("u00e9")
"""Of an escape, or a word, that may be cut off."""


def read_values(path: Path) -> Iterator[Any]:
    """Yield the values of a list: of a file that is cut off in the middle of one, those before it.

    The list is a JSON array, the one that an object has as ``traceEvents``, or values that stand one behind the other,
    one a line for example. What follows its end is not looked at. The file may be compressed with gzip, and may be a
    pipe: it is read once, in order.

    Raises:
        ConfigError: the file cannot be read, or has something else in it.
    """
    try:
        with path.open("rb") as file:
            yield from _values(_reader(file))
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error):
        raise ConfigError(f"{path} is not text, so neither JSON nor a list of numbers") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a list in JSON: {error}") from None


def _reader(file: BufferedReader) -> Callable[[], str]:
    """Return what reads the next part of a text, which is empty at its end alone."""
    source = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(_GZIP) else file
    decoder = codecs.getincrementaldecoder("utf-8")()

    def read() -> str:
        text = ""
        while not text:
            try:
                data = source.read1(_CHUNK_BYTES)
            except EOFError:  # a compressed file that is cut off
                break
            if not data:
                break
            text = decoder.decode(data)
        return text

    return read


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


_decode = json.JSONDecoder(parse_constant=_refuse).raw_decode


def _values(read: Callable[[], str]) -> Iterator[Any]:
    text, at = _begun(read)
    while True:
        if between := _BETWEEN.match(text, at):
            at = between.end()
        if text.startswith("]", at):
            return
        value, end = None, len(text)
        is_whole = False
        try:
            value, end = _decode(text, at)
            is_whole = True
        except json.JSONDecodeError as error:
            if not _is_cut(text, error):
                raise
        if end < len(text):
            yield value
            at = end
            continue
        more = _more(read, len(text) - at)  # what ends where the text does may go on in what follows
        if not more:
            if is_whole:
                yield value
            return
        text, at = text[at:] + more, 0


def _begun(read: Callable[[], str]) -> tuple[str, int]:
    """Return the begin of a text, and where in it the first value may be."""
    text = read().lstrip()
    while text.startswith("{") and len(text) < _MOST_CHARACTERS:
        if found := _LIST_OF_EVENTS.search(text):
            return text, found.end()
        if not (more := read()):
            break
        text += more
    return text, int(text.startswith("["))


def _more(read: Callable[[], str], kept_characters: int) -> str:
    """Return what follows: as much again as is kept, so that a long value is not begun too often."""
    if kept_characters > _MOST_CHARACTERS:
        raise ValueError(f"a value has more than {_MOST_CHARACTERS:,} characters")
    parts = [read()]
    while parts[-1] and sum(map(len, parts)) < kept_characters:
        parts.append(read())
    return "".join(parts)


def _is_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether what was not understood is the begin of a value that goes on behind the text."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_PART
