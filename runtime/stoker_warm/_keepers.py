"""What reads and keeps objects at a location: a proxy in this process, or a client of one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stoker.errors import ConfigError
from stoker_warm._client import WarmClient
from stoker_warm._handshake import Secret
from stoker_warm._location import WarmLocation
from stoker_warm._origin import Origin
from stoker_warm._own_proxy import OwnProxy
from stoker_warm._tier import Keeper

__all__ = ["WarmKeeper", "open_keeper"]


class WarmKeeper(Keeper, Protocol):
    """A keeper of which people at a terminal can ask more."""

    async def status(self, *, wakes: bool = False) -> Mapping[str, Any]:
        """Return how the tier does, after calling all nodes if it ``wakes``; see ``stoker_warm._server.overview``."""
        ...

    async def down(self, *, forgets: bool = False) -> list[str]:
        """Have nodes return, and drop what they hold if it ``forgets``; return what went wrong."""
        ...


async def open_keeper(location: WarmLocation, secret: Secret, *, origins: Sequence[Origin] = ()) -> WarmKeeper:
    """Return what reads and keeps objects there; ``close`` it in the end, on the same event loop.

    A proxy in this process listens and calls its nodes from here on. One elsewhere is connected to when it is first
    asked, so that it need not be there yet.

    Args:
        location: of the tier.
        secret: of the deployment.
        origins: of objects, from which a proxy in this process puts back what nodes lose if the location says so.

    Raises:
        ConfigError: what it needs is not right, or the address cannot be used.
        StokerError: functions cannot be called.
    """
    if location.fleet is not None:
        return await OwnProxy.open(location.fleet, secret, origins=origins)
    if location.proxy is None:
        raise ConfigError(f"the location {location.url} names neither a proxy nor functions")
    return WarmClient(location.proxy, secret, fingerprint=location.fingerprint)
