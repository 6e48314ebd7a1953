"""The table of a codemod: which module goes where, and which name becomes which."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a codemod does.

    Attributes:
        roots: folder of source → packages in it.
        modules: old dotted module → new one.
        names: dotted name at the top of a module, in its new place → new name.
        packages: dotted packages to create → docstring.
        files: old path → new path, of files and folders that are no modules.
        drop: packages whose ``__init__.py`` is deleted.
        keep: strings that read like a module and are left alone.
    """

    roots: dict[str, list[str]]
    modules: dict[str, str]
    names: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()
    keep: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check that a second run finds nothing to do.

        Raises:
            ValueError: two modules have one target, or a target is itself moved.
        """
        twice = [new for new, count in Counter(self.modules.values()).items() if count > 1]
        if twice:
            raise ValueError(f"several modules move to {', '.join(sorted(twice))}: give each a place of its own")
        chained = sorted(set(self.modules.values()) & set(self.modules))
        if chained:
            raise ValueError(f"{', '.join(chained)} are both left and filled: a second run would move them again")

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read a table from a TOML file with a key for each attribute."""
        read: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        lists: dict[str, Any] = {key: frozenset(read.pop(key, ())) for key in ("drop", "keep")}
        return cls(**read, **lists)

    def root_of(self, module: str) -> str | None:
        """Return the folder of source that a module's package is in, or None."""
        package = module.partition(".")[0]
        return next((root for root, packages in self.roots.items() if package in packages), None)

    def moved(self, dotted: str) -> tuple[str, str, str] | None:
        """Split a dotted name at the longest moved module in it: old module, new module, and the rest with its dot."""
        end = len(dotted)
        while end > 0:
            old = dotted[:end]
            if old in self.modules:
                return old, self.modules[old], dotted[end:]
            end = dotted.rfind(".", 0, end)
        return None

    def renamed(self, dotted: str) -> str:
        """Apply the names to a dotted name in its new place."""
        parts = dotted.split(".")
        for end in range(len(parts), 1, -1):
            new = self.names.get(".".join(parts[:end]))
            if new is not None:
                return ".".join([*parts[: end - 1], new, *parts[end:]])
        return dotted
