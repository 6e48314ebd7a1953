"""All fuzzed readers, by name."""

from __future__ import annotations

from support.fuzzed.files import FILES
from support.fuzzed.pictures import PICTURES
from support.fuzzed.reader import Reader
from support.fuzzed.texts import TEXTS
from support.fuzzed.wires import WIRES

__all__ = ["READERS"]

READERS: dict[str, Reader] = FILES | PICTURES | TEXTS | WIRES
