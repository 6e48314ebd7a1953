"""Parsing and formatting of sizes (``"8MiB"``, ``"512 MB"``, ``"16_777_216"``), rates, counts and dollars."""

from __future__ import annotations

import re
from fractions import Fraction

from stoker.errors import ConfigError

MAX_BYTES = 1 << 60
"""Maximum size in settings without another limit: an exbibyte."""

_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)} | {
    unit.lower(): 1024**power for power, unit in enumerate(_BINARY)
}
_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_MAX_CHARACTERS = 40


def parse_bytes(text: str | int, name: str = "") -> int:
    """Parse a number of bytes; fractions of a byte are rounded down.

    Args:
        text: number with an optional unit, in any case: ``B``, ``KB`` to ``PB`` (powers of 1000) or ``KiB`` to ``PiB``
            (powers of 1024). A bare ``M`` is ambiguous and therefore an error.
        name: name of the setting, for the message.

    Raises:
        ConfigError: the text is not a number of bytes, or is negative.
    """
    quoted = f"{name} {text!r:.{_MAX_CHARACTERS}}".strip()
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"a number of bytes cannot be negative: {text}")
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) and len(text) <= _MAX_CHARACTERS else None
    factor = _FACTORS.get(match[2].lower() or "b") if match else None
    if match and f"{match[2]}b".lower() in _FACTORS.keys() - {"b"}:
        raise ConfigError(f"{quoted} is not a number of bytes; write {_whole_units(match[1], match[2])}")
    if match is None or factor is None:
        raise ConfigError(f"{quoted} is not a number of bytes; write for example 8MiB, 8MB or 8388608")
    return int(Fraction(match[1].replace("_", "")) * factor)


def _whole_units(number: str, prefix: str) -> str:
    """Return the possible meanings of a unit without ``B``, such as ``1GB or 1GiB``."""
    letter = prefix[0].upper()
    binary = f"{number}{letter}iB (powers of 1024)"
    return binary if len(prefix) > 1 else f"{number}{letter}B (powers of 1000) or {binary}"


def parse_rate(text: str | int) -> float:
    """Parse a rate in bytes per second.

    Args:
        text: size as for :func:`parse_bytes`, or bits, ``bit`` to ``Tbit`` (powers of 1000), optionally followed by
            ``/s``. ``Gb`` is ambiguous (bits or bytes) and therefore an error.

    Raises:
        ConfigError: the text is not a rate, or is negative.
    """
    amount = text.strip().removesuffix("/s") if isinstance(text, str) else text
    match = _SIZE.fullmatch(amount) if isinstance(amount, str) and len(amount) <= _MAX_CHARACTERS else None
    if match and (bits := _BITS.get(match[2].lower())):
        return float(Fraction(match[1].replace("_", "")) * bits / 8)
    try:
        if match and match[2].endswith("b"):
            raise ConfigError(f"bits or bytes: {match[2]}")
        return float(parse_bytes(amount))
    except ConfigError:
        quoted = f"{text!r:.{_MAX_CHARACTERS}}"
        raise ConfigError(f"{quoted} is not a rate; write for example 10Gbit, 1.25GB or 400MiB/s") from None


def format_bytes(size_bytes: float) -> str:
    """Format a number of bytes with three significant digits and a binary unit, such as ``8.00 MiB``."""
    power = 0
    while abs(size_bytes) >= 1000 and power < len(_BINARY) - 1:
        size_bytes /= 1024
        power += 1
    if power == 0:
        return f"{size_bytes:.0f} B"
    digits = 2 if abs(size_bytes) < 10 else 1 if abs(size_bytes) < 100 else 0
    return f"{size_bytes:.{digits}f} {_BINARY[power]}"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: ``1 sample``, ``1,500 samples``, or ``2 classes`` with a given ``plural``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def format_dollars(dollars: float) -> str:
    """Format US dollars with two digits from one dollar on, and with six below, such as ``$0.000016``."""
    return f"${dollars:,.2f}" if dollars >= 1 else f"${dollars:.6f}"
