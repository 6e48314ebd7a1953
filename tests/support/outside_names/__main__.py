"""Rewrite the lists of externally visible names."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from support.outside_names import COLLECTORS, GOLDEN, collected

for kind in COLLECTORS:
    with TemporaryDirectory() as folder:
        lines = collected(kind, Path(folder))
    (GOLDEN / f"{kind}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{kind}: {len(lines)} names")
