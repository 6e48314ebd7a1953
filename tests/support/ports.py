"""Ports for programs that can only be told one."""

from __future__ import annotations

from stoker_local.functions._google import reserve_port

__all__ = ["kept_port"]


def kept_port() -> int:
    """Return a loopback port that nobody else gets within a minute: one that is only free may be anybody's soon."""
    return reserve_port("127.0.0.1")
