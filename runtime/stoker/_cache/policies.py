"""Policies by the names that they have in settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from stoker._cache.fifo import Fifo
from stoker._cache.lru import Lru
from stoker._cache.next_use import NextUse
from stoker._cache.uniform import Uniform
from stoker.abc import EvictionPolicy, NextUseOracle
from stoker.errors import ConfigError

__all__ = ["POLICIES", "check_policy", "made_policy"]

Key = TypeVar("Key", bound=Hashable)

POLICIES: Mapping[str, Callable[[NextUseOracle[Any]], EvictionPolicy[Any]]] = {
    "next-use": lambda future: NextUse(future.next_use, lambda: future.present),
    "uniform": lambda _: Uniform(),
    "lru": lambda _: Lru(),
    "fifo": lambda _: Fifo(),
}
"""Name → what makes the policy, of what tells the future."""


def check_policy(name: str) -> None:
    """Pass if there is a policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy is one of {', '.join(POLICIES)}, not {name!r:.40}")


def made_policy(name: str, future: NextUseOracle[Key]) -> EvictionPolicy[Key]:
    """Return a policy that nobody uses yet.

    Raises:
        ConfigError: there is none of that name.
    """
    check_policy(name)
    return POLICIES[name](future)
