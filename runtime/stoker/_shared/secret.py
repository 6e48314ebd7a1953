"""A tenant's secret of shared tiers, and the values derived from it: object names, request tokens, and MAC keys.

Each derivation is an HMAC-SHA256 with its own label, so a token reveals nothing about names. A name is the HMAC of an
object's identity: without the secret one can neither compute the name of a known object, nor make a server store other
bytes under it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import ClassVar, Self

from stoker._format.identity import ObjectIdentity, identity_of, sha256_128
from stoker.abc import ObjectRef
from stoker.errors import ConfigError

SECRET_VARIABLE = "STOKER_TIER_SECRET"  # noqa: S105 - a name
_MIN_BYTES = 32


class EnvironmentSecret:
    """A secret of at least 32 bytes, from an environment variable. ``repr`` does not show it.

    Attributes:
        variable: Name of the environment variable.
        owner: The component that the secret belongs to, for messages.
        remedy: How to create and distribute the secret, for messages.

    Raises:
        ConfigError: The secret is too short.
    """

    __slots__ = ("_key",)
    variable: ClassVar[str]
    owner: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, key: bytes) -> None:
        if len(key) < _MIN_BYTES:
            raise ConfigError(
                f"{self.owner}'s secret must have at least {_MIN_BYTES} bytes, not {len(key)}; {self.remedy}"
            )
        self._key = bytes(key)

    @classmethod
    def generate(cls) -> Self:
        """Return a new random secret."""
        return cls(secrets.token_bytes(_MIN_BYTES))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a secret in base64url, or base64 as other tools write it, with or without padding.

        Surrounding white space is ignored: the stored output of a command ends with a line break.

        Raises:
            ConfigError: The text is empty, malformed, or too short.
        """
        text = text.strip()
        if not text:
            raise ConfigError(f"{cls.variable} is not set, so {cls.owner} has no secret; {cls.remedy}")
        try:
            key = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(f"{cls.owner}'s secret is not base64url; {cls.remedy}") from None
        return cls(key)

    def reveal(self) -> str:
        """Return the secret as base64url, to be set as an environment variable."""
        return base64.urlsafe_b64encode(self._key).rstrip(b"=").decode()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"

    def __reduce__(self) -> str:
        raise TypeError("a secret cannot be pickled; pass it through the environment")


class TierSecret(EnvironmentSecret):
    """The secret that a tenant's trainers share with the servers of a tier.

    Attributes:
        tenant: Id of the tenant in folders and metrics: 16 hexadecimal digits that reveal nothing about the secret.
        token: Bearer token of requests for objects.
        metrics_token: Bearer token of requests for metrics, valid for nothing else.
        shards_key: Key of the MACs of the shards in a warm tier, 32 bytes.
    """

    __slots__ = ("_names_key", "metrics_token", "shards_key", "tenant", "token")
    variable = SECRET_VARIABLE
    owner = "the shared tier"
    remedy = "create one with `stoker tier secret`, and set it for servers and trainers"

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._names_key = self._derive("names")
        self.tenant = self._derive("tenant").hex()[:16]
        self.token = self._derive("token").hex()
        self.metrics_token = self._derive("metrics").hex()
        self.shards_key = self._derive("shards")

    @classmethod
    def parse_all(cls, environment: Mapping[str, str]) -> tuple[TierSecret, ...]:
        """Parse the secrets of all tenants of a server, separated by commas in the environment variable.

        Raises:
            ConfigError: There is no secret, one is malformed, or two are equal.
        """
        secrets = tuple(cls.parse(text) for text in environment.get(SECRET_VARIABLE, "").split(","))
        if len({each.tenant for each in secrets}) < len(secrets):
            raise ConfigError(f"{SECRET_VARIABLE} holds the same secret twice; give each tenant its own")
        return secrets

    def object_name(self, ref: ObjectRef) -> str:
        """Return the name under which servers store an object: 32 hexadecimal digits.

        Digits 9 to 16 are the object's size, as in the names of :mod:`stoker._cache.index`; the others are the HMAC.
        """
        return self._name(identity_of(ref.dataset, ref), ref.size_bytes)

    def is_name_of(self, name: str, data: memoryview) -> bool:
        """Return whether a name belongs to these bytes, by their SHA-256."""
        return hmac.compare_digest(name, self._name(ObjectIdentity(sha256_128(data), is_strong=True), len(data)))

    def _name(self, identity: ObjectIdentity, size_bytes: int) -> str:
        kind, size = b"strong" if identity.is_strong else b"weak", f"{size_bytes:08x}"
        digest = hmac.digest(self._names_key, b":".join((kind, size.encode(), identity.value)), sha256).hex()
        return f"{digest[:8]}{size}{digest[8:24]}"

    def group_id(self, dataset: str) -> str:
        """Return an id that groups a data set's objects on a server, and reveals nothing else about it."""
        return self._derive(f"group:{dataset}").hex()[:16]

    def _derive(self, label: str) -> bytes:
        return hmac.digest(self._key, f"stoker tier 1 {label}".encode(), sha256)


def matches_key(secrets: Sequence[TierSecret], key: str, data: memoryview) -> bool:
    """Return whether bytes belong to the key ``<tenant>/<name>`` of one of the tenants, by their SHA-256."""
    tenant, _, name = key.partition("/")
    return any(secret.tenant == tenant and secret.is_name_of(name, data) for secret in secrets)
