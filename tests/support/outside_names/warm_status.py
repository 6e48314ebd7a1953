"""What ``stoker warm status --json`` and ``bench --json`` write of a tier in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stoker.testing import run_virtual
from stoker_warm._commands.warm import measured
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import Code
from support.outside_names.shape import shape
from support.warm_clients import SharedTier

__all__ = ["warm_output"]


def warm_output(_: Path) -> Iterator[str]:
    """Return the shape of a status and of a measurement."""
    lines: list[str] = []

    async def ask() -> None:
        async with SharedTier(WarmConfig(nodes=4, code=Code(2, 1))) as tier:
            tier.broken.add("warm-3")
            client = tier.client()
            lines.extend(shape("stoker warm status --json ", await client.status(wakes=True)))
            lines.extend(
                shape("stoker warm bench --json ", await measured(client, objects=2, size_bytes=1000, at_once=1))
            )

    run_virtual(ask())
    yield from lines
