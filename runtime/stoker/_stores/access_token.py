"""Tokens for clients without cloud credentials: which data sets may be read, and when, signed with HMAC-SHA256.

A token is ``stoker1.<key id>.<payload>.<signature>``. The payload is compact JSON in base64url without padding; the
signature is of all that stands before its dot, as text. So whoever checks it decodes nothing before the signature is
known to be right, and there is one spelling of a token only: each other one has another signature.

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
"""What a served data set can be called: nothing that a URL would have to escape."""

LEAST_KEY_BYTES = 32
SKEW_SECONDS = 60.0
"""How far the clocks of who signs and who checks may be apart."""

_MAX_DATASETS = 64
_MAX_SECONDS = 366 * 24 * 3600
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
_TOKEN = re.compile(r"(stoker1\.([A-Za-z0-9_-]{1,32})\.([A-Za-z0-9_-]{1,8192}))\.([A-Za-z0-9_-]{43})", re.ASCII)
_REFUSED = "the token is missing, not valid, or not valid at this time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a token allows: reading data sets, for a time.

    Attributes:
        datasets: their names, as ``STOKER_DATASETS`` has them.
        not_before_seconds: POSIX time from which it holds.
        expires_seconds: POSIX time from which it holds no more.

    Raises:
        ConfigError: there is no data set, a name is none, or the time is empty or longer than 366 days.
    """

    datasets: tuple[str, ...]
    not_before_seconds: int
    expires_seconds: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.datasets) <= _MAX_DATASETS or not all(map(DATASET_NAME.fullmatch, self.datasets)):
            raise ConfigError(f"a token is for 1 to {_MAX_DATASETS} data sets with names like {DATASET_NAME.pattern}")
        if not 0 < self.expires_seconds - self.not_before_seconds <= _MAX_SECONDS or self.not_before_seconds < 0:
            raise ConfigError("a token holds for more than no time and at most 366 days")


class TokenKeys:
    """The keys of a deployment: the first one signs, and any of them checks, so that keys can be replaced.

    Args:
        keys: id → secret, of at least 32 bytes.

    Raises:
        ConfigError: there is no key, or one is too short; no secret is repeated.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ConfigError("there is no key for tokens; make one with: stoker token --new-key ID")
        for name, secret in keys.items():
            if not _KEY_ID.fullmatch(name):
                raise ConfigError("a key for tokens has an id with other than letters, digits, - and _, at most 32")
            if len(secret) < LEAST_KEY_BYTES:
                raise ConfigError(f"the key {name} for tokens has {len(secret)} bytes, fewer than {LEAST_KEY_BYTES}")
        self._keys = dict(keys)

    def __repr__(self) -> str:
        return f"<TokenKeys {', '.join(self._keys)}>"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the keys in the variable ``STOKER_TOKEN_KEYS``: ``id:base64url``, separated by blanks.

        Raises:
            ConfigError: that is not what the text is; no part of it is repeated.
        """
        keys: dict[str, bytes] = {}
        for number, pair in enumerate(text.split(), 1):
            name, colon, secret = pair.partition(":")
            decoded = _decoded(secret) if colon else None
            if decoded is None or name in keys:
                raise ConfigError(f"key {number} of STOKER_TOKEN_KEYS is not id:base64url, or its id is there twice")
            keys[name] = decoded
        return cls(keys)

    def sign(self, grant: Grant) -> str:
        """Return the token of a grant, signed by the first key."""
        payload = {
            "datasets": list(grant.datasets),
            "expires": grant.expires_seconds,
            "not_before": grant.not_before_seconds,
        }
        name, secret = next(iter(self._keys.items()))
        signed = f"stoker1.{name}.{_encoded(json.dumps(payload, separators=(',', ':')).encode())}"
        return f"{signed}.{_signature(secret, signed)}"

    def verify(self, token: str, now_seconds: float) -> Grant:
        """Return what a token allows at the POSIX time ``now_seconds``; compares in constant time.

        Raises:
            CredentialsError: it is none of ours, or not of this time. It does not say which.
        """
        match = _TOKEN.fullmatch(token)
        secret = self._keys.get(match[2]) if match else None
        if match is None or secret is None:
            raise CredentialsError(_REFUSED)
        if not hmac.compare_digest(_signature(secret, match[1]).encode(), match[4].encode()):
            raise CredentialsError(_REFUSED)
        grant = _grant(match[3])
        if not grant.not_before_seconds - SKEW_SECONDS <= now_seconds < grant.expires_seconds + SKEW_SECONDS:
            raise CredentialsError(_REFUSED)
        return grant


def key_text(name: str, secret: bytes) -> str:
    """Return a key as ``STOKER_TOKEN_KEYS`` has it.

    Raises:
        ConfigError: it is not valid.
    """
    TokenKeys({name: secret})
    return f"{name}:{_encoded(secret)}"


def end_of(token: str) -> datetime | None:
    """Return when a token says that it ends, which is not verified: that takes a key. None if it is none of ours."""
    match = _TOKEN.fullmatch(token)
    try:
        return datetime.fromtimestamp(_grant(match[3]).expires_seconds, UTC) if match else None
    except (CredentialsError, OverflowError, ValueError, OSError):  # the last three: it is of no year that there is
        return None


def _grant(payload: str) -> Grant:
    """Read a payload; a later program may have signed what this one does not know."""
    try:
        said = json.loads(_decoded(payload) or b"")
        return Grant(
            datasets=tuple(said["datasets"]),
            not_before_seconds=said["not_before"],
            expires_seconds=said["expires"],
        )
    except (ValueError, LookupError, TypeError):
        raise CredentialsError(_REFUSED) from None


def _signature(secret: bytes, text: str) -> str:
    return _encoded(hmac.digest(secret, text.encode(), hashlib.sha256))


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes | None:
    """Return the bytes that base64url spells, None if it is not spelled in the one canonical way, without padding."""
    try:
        data = urlsafe_b64decode(f"{text}{'=' * (-len(text) % 4)}")
    except ValueError:
        return None
    return data if _encoded(data) == text else None
