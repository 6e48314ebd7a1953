"""A warm tier from what a setting says of it."""

from __future__ import annotations

import os

from stoker.abc import Readable
from stoker.errors import ConfigError
from stoker_warm._code import require_codec
from stoker_warm._handshake import Secret
from stoker_warm._keepers import open_keeper
from stoker_warm._lazy import LazyKeeper
from stoker_warm._location import WarmLocation
from stoker_warm._origin import BucketOrigin
from stoker_warm._tier import WarmTier

__all__ = ["secret_of_environment", "warm_tier_at"]


def secret_of_environment() -> Secret:
    """Return the deployment's secret, of the variable ``STOKER_WARM_SECRET``.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    return Secret.parse(os.environ.get("STOKER_WARM_SECRET", ""))


def warm_tier_at(url: str, *, store: Readable, processes: int = 1) -> WarmTier:
    """Return a tier; nothing is connected to, and no function called, before the first read.

    Args:
        url: as :class:`~stoker_warm._location.WarmLocation` has it.
        store: of the data set, from which a proxy in this process puts back what nodes lose if the URL says so.
        processes: that read through a tier each, in the whole job.

    Raises:
        ConfigError: it is not right, there is no secret, or every process would have a proxy of its own.
        MissingExtraError: what the code of a proxy in this process needs is not installed.
    """
    location, secret = WarmLocation.parse(url), secret_of_environment()
    if location.fleet is not None:
        if processes > 1:
            raise ConfigError(
                f"{processes} processes read, and nodes serve one proxy: run `stoker warm proxy` with this URL, and "
                "give all of them the warm:// URL that it prints"
            )
        require_codec(location.fleet.config.code)
    return WarmTier(LazyKeeper(lambda: open_keeper(location, secret, origins=[BucketOrigin(store)])))
