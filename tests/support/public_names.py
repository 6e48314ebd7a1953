"""The modules that users import from."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PUBLIC", "ROOT"]

ROOT = Path(__file__).parents[2]
PUBLIC = (
    *("stoker", "stoker.abc", "stoker.cli", "stoker.errors", "stoker.fanout", "stoker.files", "stoker.images"),
    *("stoker.testing", "stoker.trace", "stoker_functions", "stoker_functions.aws", "stoker_functions.gcp"),
    *("stoker_functions.serve", "stoker_local", "stoker_local.functions", "stoker_sim", "stoker_torch"),
)
