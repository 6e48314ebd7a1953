"""What the papers say, as files beside the simulator."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import resources
from typing import Any

__all__ = ["published"]


@lru_cache(maxsize=16)
def published(paper: str) -> dict[str, Any]:
    """Return a paper's figures and statements; ``source`` says where they stand."""
    return tomllib.loads(resources.files("stoker_sim").joinpath(f"published/{paper}.toml").read_text("utf-8"))
