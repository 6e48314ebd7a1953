"""AWS credentials in one event loop: where botocore's chain finds them, kept fresh; and signatures made with them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import TypeAlias

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound
from botocore.loaders import Loader, create_loader

from stoker.errors import ConfigError, CredentialsError
from stoker.store.standing import Identity

__all__ = ["AwsCredentials", "Keys", "botocore_session", "configured_region", "signed"]

Keys: TypeAlias = tuple[str, str, str | None]

_KINDS = {"env": "environment variables", "explicit": "given keys"}
"""What botocore calls its sources, where that says too little."""
_NONE_FOUND = (
    "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, "
    "run where a role is attached"
)


class AwsCredentials:
    """Credentials of the standard chain, or ready keys.

    Args:
        profile: a section of the AWS configuration files.
        keys: an access key, its secret, and a session token or None; nothing else is asked then.
        otherwise: what else a user without credentials can do; the message ends with it.

    Attributes:
        session: botocore's, which is another one after credentials were looked for afresh.
    """

    def __init__(self, *, profile: str | None, keys: Keys | None = None, otherwise: str) -> None:
        self._profile, self._keys, self._otherwise = profile, keys, otherwise
        self._lock = asyncio.Lock()
        self.session = botocore_session(profile, keys)

    async def current(self) -> ReadOnlyCredentials:
        """Return credentials, refreshed if they are about to expire.

        Raises:
            CredentialsError: there are none.
        """
        return (await self._found())[1]

    async def _found(self) -> tuple[AioCredentials, ReadOnlyCredentials]:
        async with self._lock:
            try:
                found = await self.session.get_credentials()
                if found is None:
                    raise CredentialsError(f"{_NONE_FOUND}{self._otherwise}")
                frozen: ReadOnlyCredentials = await found.get_frozen_credentials()
            except (BotoCoreError, ClientError) as error:
                raise CredentialsError(f"AWS credentials could not be had: {error}") from error
        return found, frozen

    async def identity(self) -> Identity:
        """Return whose these are; how long temporary keys last that somebody gave us, nobody knows.

        Raises:
            CredentialsError: there are none.
        """
        found, keys = await self._found()
        expires: datetime | None = getattr(found, "_expiry_time", None)  # botocore has no public name for it
        kind = _KINDS.get(found.method, found.method) + (", temporary" if expires is None and keys.token else "")
        return Identity(kind=kind, expires=expires, is_renewed=expires is not None)

    async def renew(self, used: ReadOnlyCredentials) -> ReadOnlyCredentials:
        """Look for credentials afresh, unless another call has done so since ``used`` were taken."""
        current = await self.current()
        if current == used:
            self.session = botocore_session(self._profile, self._keys)
            current = await self.current()
        return current


def botocore_session(profile: str | None, keys: Keys | None) -> AioSession:
    """Return a session of botocore's that has looked for nothing yet."""
    session = AioSession(profile=profile)
    session.register_component("data_loader", _data_loader())
    if keys is not None:
        session.set_credentials(*keys)
    return session


def configured_region(session: AioSession) -> str | None:
    """Return the region of ``AWS_DEFAULT_REGION`` or the profile, None if neither says one.

    Raises:
        ConfigError: there is no such profile.
    """
    try:
        region: str | None = session.get_config_variable("region")
    except ProfileNotFound as error:
        raise ConfigError(f"{error}; check AWS_PROFILE and the AWS configuration files") from error
    return region


def signed(
    url: str, headers: Mapping[str, str], signer: ReadOnlyCredentials, *, service: str, region: str
) -> dict[str, str]:
    """Return the headers of a GET with a signature over them and the URL: AWS's version 4, by botocore."""
    request = AWSRequest(method="GET", url=url, headers=dict(headers))
    SigV4Auth(signer, service, region).add_auth(request)
    return dict(request.headers.items())


@cache
def _data_loader() -> Loader:
    """The reader of botocore's service descriptions; it remembers them, so that only the first client costs 0.1 s."""
    return create_loader()
