"""Output of ``stoker warm status --json`` and ``bench --json`` for a tier in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stoker.abc import Answer
from stoker.errors import ServerError
from stoker.testing import run_virtual
from stoker_warm._commands.warm import BenchTarget, flush_proxy, run_bench
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._tier import WarmTier
from support.outside_names.shape import shape
from support.warm_platform import TIER_SECRET, Tier

__all__ = ["warm_output"]


def warm_output(_: Path) -> Iterator[str]:
    """Return the shape of a status and of a measurement."""
    lines: list[str] = []

    async def ask() -> None:
        tier = Tier(WarmConfig(nodes=4, code=ErasureCode(2, 1)))
        invoke = tier.platform.invoke

        async def broken(name: str, event: Mapping[str, Any]) -> Answer:
            if name == "warm-3":
                raise ServerError("it is broken")
            return await invoke(name, event)

        tier.proxy._invoke, client = broken, tier.proxy
        async with tier:
            lines.extend(shape("stoker warm status --json ", await client.status(wake_nodes=True)))
            bench = BenchTarget(WarmTier.from_proxy(client, TIER_SECRET), client.status, partial(flush_proxy, client))
            lines.extend(
                shape("stoker warm bench --json ", await run_bench(bench, objects=2, size_bytes=1000, concurrency=1))
            )

    run_virtual(ask())
    yield from lines
