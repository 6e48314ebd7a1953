"""Kinds of requests to a store, where their reader is, and the key by which a store's prices are found."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Literal

from stoker._base.fields import shown
from stoker.errors import ConfigError

__all__ = ["Egress", "Operation", "PriceKey", "check_store_name"]

_STORE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)

Egress = Literal["same_region", "other_region", "internet"]


class Operation(enum.StrEnum):
    """A kind of request to a store, as stores bill them."""

    GET = "GET"
    HEAD = "HEAD"
    PUT = "PUT"
    LIST = "LIST"
    DELETE = "DELETE"


@dataclass(frozen=True, slots=True)
class PriceKey:
    """What the prices of a store are found by.

    Attributes:
        url: of the store.
        endpoint: URL of the service that is asked instead of the cloud's own; empty for the cloud's own.
        name: of a store in the price file, where the user has named one; it decides.
    """

    url: str
    endpoint: str = ""
    name: str = ""


def check_store_name(name: object) -> None:
    """Raise ConfigError unless a store in a price file may have this name."""
    if not isinstance(name, str) or not _STORE_NAME.fullmatch(name):
        raise ConfigError(
            f"{shown(name)} is no name of a store in the price file: write one as r2 or minio, of a-z, 0-9, . _ and -"
        )
