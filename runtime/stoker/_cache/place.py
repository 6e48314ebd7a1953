"""The grammar that settings of caches share: ``memory:?limit=2GB``, ``disk:FOLDER?limit=20GB``, and ``&NAME=VALUE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from stoker.errors import ConfigError


def parse_place(text: object, optional: Sequence[str]) -> tuple[Path | None, dict[str, str]]:
    """Return the folder of a cache, None for memory, and its options by name, with ``limit`` among them.

    Args:
        text: the setting.
        optional: names of the options that it may have beside ``limit``.

    Raises:
        ValueError: the text has another form; says only the reason, so that the caller names the setting.
    """
    if not isinstance(text, str):
        raise ConfigError("it must be a string")
    kind, _, rest = text.partition(":")
    path, _, query = rest.partition("?")
    if kind not in ("disk", "memory") or bool(path) != (kind == "disk") or "\0" in path:
        raise ConfigError("it is not a cache, neither memory nor a disk")
    given = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    options = dict(given)
    if "limit" not in options or len(options) < len(given) or not options.keys() <= {"limit", *optional}:
        may_have = " and ".join(f"{name}=" for name in optional)
        raise ConfigError(f"it must have limit= and may have {may_have}, each once")
    try:
        return Path(path).expanduser().absolute() if path else None, options
    except RuntimeError as error:  # there is no such home directory
        raise ConfigError(str(error)) from None
