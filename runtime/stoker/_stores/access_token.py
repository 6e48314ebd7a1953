"""Access tokens for clients without cloud credentials: data sets and a time span, signed with HMAC-SHA256.

A token is ``stoker1.<key id>.<payload>.<signature>``. The payload is compact JSON in base64url without padding. The
signature covers the text before its dot, so verification decodes nothing before the signature is valid, and a token
has only one spelling.

HMAC: RFC 2104; SHA-256: FIPS 180-4; base64url: RFC 4648, section 5.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from stoker.errors import ConfigError, CredentialsError

DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
"""Valid names of served data sets, which need no escaping in URLs."""

MIN_KEY_BYTES = 32
SKEW_SECONDS = 60.0
"""Maximum difference between the clocks of signer and verifier."""

_MAX_DATASETS = 64
_MAX_SECONDS = 366 * 24 * 3600
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
_TOKEN = re.compile(r"(stoker1\.([A-Za-z0-9_-]{1,32})\.([A-Za-z0-9_-]{1,8192}))\.([A-Za-z0-9_-]{43})", re.ASCII)
_REFUSED = "the token is missing, not valid, or not valid at this time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The permissions of a token: data sets to read, and a time span.

    Attributes:
        datasets: Names of the data sets, as in ``STOKER_DATASETS``.
        not_before_seconds: POSIX time at which the token becomes valid.
        expires_seconds: POSIX time at which the token expires.

    Raises:
        ConfigError: There is no data set, a name is invalid, or the time span is empty or longer than 366 days.
    """

    datasets: tuple[str, ...]
    not_before_seconds: int
    expires_seconds: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.datasets) <= _MAX_DATASETS or not all(map(DATASET_NAME.fullmatch, self.datasets)):
            raise ConfigError(f"a token is for 1 to {_MAX_DATASETS} data sets with names like {DATASET_NAME.pattern}")
        if not 0 < self.expires_seconds - self.not_before_seconds <= _MAX_SECONDS or self.not_before_seconds < 0:
            raise ConfigError("a token must be valid for more than 0 s and at most 366 days")


class TokenKeys:
    """The signing keys of a deployment: the first one signs, and all of them verify, so keys can be rotated.

    Example:
        >>> import secrets
        >>> TokenKeys({"2026-07": secrets.token_bytes(32), "2026-01": secrets.token_bytes(32)})
        <TokenKeys 2026-07, 2026-01>

    Args:
        keys: Id → secret of at least 32 bytes.

    Raises:
        ConfigError: There is no key, an id is invalid, or a key is too short; messages show no secrets.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ConfigError("there is no key for tokens; create one with: stoker token --new-key ID")
        for name, secret in keys.items():
            if not _KEY_ID.fullmatch(name):
                raise ConfigError("the id of a key for tokens must have 1 to 32 letters, digits, - and _")
            if len(secret) < MIN_KEY_BYTES:
                raise ConfigError(f"the key {name} for tokens has {len(secret)} bytes, fewer than {MIN_KEY_BYTES}")
        self._keys = dict(keys)

    def __repr__(self) -> str:
        return f"<TokenKeys {', '.join(self._keys)}>"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the variable ``STOKER_TOKEN_KEYS``: keys ``id:base64url``, separated by white space.

        Raises:
            ConfigError: The text is malformed; the message shows no part of it.
        """
        keys: dict[str, bytes] = {}
        for number, pair in enumerate(text.split(), 1):
            name, colon, secret = pair.partition(":")
            decoded = _decode_base64url(secret) if colon else None
            if decoded is None or name in keys:
                raise ConfigError(f"key {number} of STOKER_TOKEN_KEYS is not id:base64url, or repeats an id")
            keys[name] = decoded
        return cls(keys)

    def sign(self, grant: Grant) -> str:
        """Return a token for a grant, signed with the first key."""
        payload = {
            "datasets": list(grant.datasets),
            "expires": grant.expires_seconds,
            "not_before": grant.not_before_seconds,
        }
        name, secret = next(iter(self._keys.items()))
        signed = f"stoker1.{name}.{_encode_base64url(json.dumps(payload, separators=(',', ':')).encode())}"
        return f"{signed}.{_signature(secret, signed)}"

    def verify(self, token: str, now_seconds: float) -> Grant:
        """Return the grant of a token that is valid at the POSIX time ``now_seconds``; compares in constant time.

        Raises:
            CredentialsError: The token is invalid or expired; the message does not say which.
        """
        match = _TOKEN.fullmatch(token)
        secret = self._keys.get(match[2]) if match else None
        if match is None or secret is None:
            raise CredentialsError(_REFUSED)
        if not hmac.compare_digest(_signature(secret, match[1]).encode(), match[4].encode()):
            raise CredentialsError(_REFUSED)
        grant = _parse_grant(match[3])
        if not grant.not_before_seconds - SKEW_SECONDS <= now_seconds < grant.expires_seconds + SKEW_SECONDS:
            raise CredentialsError(_REFUSED)
        return grant


def format_key(name: str, secret: bytes) -> str:
    """Format a key for ``STOKER_TOKEN_KEYS``.

    Raises:
        ConfigError: The key is invalid.
    """
    TokenKeys({name: secret})
    return f"{name}:{_encode_base64url(secret)}"


def parse_expiry(token: str) -> datetime | None:
    """Return the expiry that a token states, without verifying it, which needs a key; None if it is not our token."""
    match = _TOKEN.fullmatch(token)
    try:
        return datetime.fromtimestamp(_parse_grant(match[3]).expires_seconds, UTC) if match else None
    except (CredentialsError, OverflowError, ValueError, OSError):  # the last three: the year is out of range
        return None


def _parse_grant(payload: str) -> Grant:
    """Parse a payload, which a later version may have signed in a form unknown to this one."""
    try:
        claims = json.loads(_decode_base64url(payload) or b"")
        return Grant(
            datasets=tuple(claims["datasets"]),
            not_before_seconds=claims["not_before"],
            expires_seconds=claims["expires"],
        )
    except (ValueError, LookupError, TypeError):
        raise CredentialsError(_REFUSED) from None


def _signature(secret: bytes, text: str) -> str:
    return _encode_base64url(hmac.digest(secret, text.encode(), hashlib.sha256))


def _encode_base64url(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_base64url(text: str) -> bytes | None:
    """Decode base64url without padding; None if the text is not in canonical form."""
    try:
        data = urlsafe_b64decode(f"{text}{'=' * (-len(text) % 4)}")
    except ValueError:
        return None
    return data if _encode_base64url(data) == text else None
