"""Doing something with credentials that may expire under way: once more, with new ones, if there are any."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from stoker.errors import CredentialsError

__all__ = ["ExpiredCredentialsError", "Renewable", "with_renewal"]

_C = TypeVar("_C")
_T = TypeVar("_T")


class ExpiredCredentialsError(CredentialsError):
    """Credentials have expired; others may be had where these came from."""


class Renewable(Protocol[_C]):
    """Where credentials come from."""

    async def current(self) -> _C:
        """Return credentials, refreshed if they say themselves that they are about to expire."""
        ...

    async def renew(self, used: _C) -> _C:
        """Look afresh, unless that was done since ``used`` were taken; return ``used`` if there are no others."""
        ...


async def with_renewal(source: Renewable[_C], work: Callable[[_C], Awaitable[_T]]) -> _T:
    """Do ``work``; if the store says that the credentials have expired, renew them and do it once more.

    Raises:
        CredentialsError: there are none, or only expired ones.
    """
    used = await source.current()
    try:
        return await work(used)
    except ExpiredCredentialsError:
        renewed = await source.renew(used)
        if renewed == used:
            raise
    return await work(renewed)
