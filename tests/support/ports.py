"""Ports for programs that cannot choose a free one themselves."""

from __future__ import annotations

from stoker_local.functions._google import reserve_port

__all__ = ["reserved_port"]


def reserved_port() -> int:
    """Return a loopback port that is reserved for a minute; another process may soon get one that is only free."""
    return reserve_port("127.0.0.1")
