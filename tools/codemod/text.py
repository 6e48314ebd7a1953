"""Dotted names and file paths in any text: documents, settings, strings and comments of Python."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tools.codemod.table import Table

__all__ = ["TextRewriter"]


@dataclass(slots=True, kw_only=True)
class TextRewriter:
    """Rewrites what names a moved module in a text, and collects what it leaves alone.

    Attributes:
        table: what moves.
        paths: old path of a file or folder → new path, both from the root of the repository.
        exports: package → names that its ``__init__`` defines; ``package.other`` is no name of ours.
        doubts: what reads like a moved module and was not rewritten.
    """

    table: Table
    paths: Mapping[str, str]
    exports: Mapping[str, Collection[str]]
    doubts: list[str] = field(default_factory=list)
    _dotted: re.Pattern[str] = field(init=False)
    _path: re.Pattern[str] = field(init=False)
    _short_paths: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the patterns."""
        packages = "|".join(sorted({name for names in self.table.roots.values() for name in names}))
        self._dotted = re.compile(rf"(?<![\w./@-])(?:{packages})(?:\.[A-Za-z_]\w*)+(?![\w/-])")
        self._path = re.compile(
            rf"(?<![\w-])(?:(?:{'|'.join(self.table.roots)})/)?(?:{packages})(?:/[\w-]+)*(?:\.\w+)*"
        )
        self._short_paths = {self._without_root(old): self._without_root(new) for old, new in self.paths.items()}

    def rewrite(self, text: str) -> str:
        """Return the text with dotted names and paths of moved modules in their new place."""
        return self._path.sub(self._new_path, self._dotted.sub(self._new_dotted, text))

    def _new_dotted(self, match: re.Match[str]) -> str:
        dotted = match[0]
        split = None if dotted in self.table.keep else self.table.moved(dotted)
        if split is None:
            self._doubt(dotted)
            return self.table.renamed(dotted)
        old, new, rest = split
        if rest and old in self.exports and rest.split(".")[1] not in self.exports[old]:
            self._doubt(dotted)
            return dotted
        return self.table.renamed(new + rest)

    def _new_path(self, match: re.Match[str]) -> str:
        path = match[0]
        for known in (self.paths, self._short_paths):
            end = len(path)
            while end > 0:
                new = known.get(path[:end])
                if new is not None:
                    return new + path[end:]
                end = path.rfind("/", 0, end)
        if "/" in path.removesuffix("/"):
            self._doubt(path.replace("/", "."), path)
        return path

    def _doubt(self, dotted: str, said: str | None = None) -> None:
        """Note what lies in a package of which something moved, unless it stays."""
        if dotted in self.table.keep or not any(f"{dotted}.".startswith(f"{old}.") for old in self.table.modules):
            return
        self.doubts.append(said or dotted)

    def _without_root(self, path: str) -> str:
        return next((path.removeprefix(f"{root}/") for root in self.table.roots if path.startswith(f"{root}/")), path)
