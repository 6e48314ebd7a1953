"""Signatures of reads of S3 objects (AWS Signature Version 4), computed with few objects: about 8 µs each.

botocore signs everything else. Both compute the same signature from "AWS Signature Version 4 for API requests: Create a
signed request" (AWS Identity and Access Management User Guide).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


class ReadSigner:
    """Signs requests without query and body for one region, all headers included.

    Args:
        region: Region of the signatures.
        clock: Function that returns POSIX time in seconds.
    """

    def __init__(self, region: str, clock: Callable[[], float] = time.time) -> None:
        self._region, self._clock = region, clock
        self._second, self._timestamp = -1, ""
        self._key: tuple[str, str, bytes] = ("", "", b"")

    def sign(
        self, keys: ReadOnlyCredentials, method: str, host: str, path: str, headers: dict[str, str]
    ) -> dict[str, str]:
        """Return the headers with date, session token and signature.

        Args:
            keys: Credentials to sign with.
            method: HTTP method.
            host: Value of the header ``Host``.
            path: Percent-encoded path.
            headers: Other headers, whose values have no repeated blanks.
        """
        timestamp = self._current_timestamp()
        signed = {**headers, "X-Amz-Date": timestamp}
        if keys.token:
            signed["X-Amz-Security-Token"] = keys.token
        signed["X-Amz-Content-SHA256"] = _EMPTY_SHA256
        canonical = sorted([("host", host), *((name.lower(), value) for name, value in signed.items())])
        fields = "".join([f"{name}:{value}\n" for name, value in canonical])
        names = ";".join([name for name, _ in canonical])
        request = f"{method}\n{path}\n\n{fields}\n{names}\n{_EMPTY_SHA256}"
        scope = f"{timestamp[:8]}/{self._region}/s3/aws4_request"
        text = f"{_ALGORITHM}\n{timestamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(self._signing_key(keys.secret_key or "", scope), text.encode(), "sha256").hex()
        signed["Authorization"] = (
            f"{_ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return signed

    def _current_timestamp(self) -> str:
        second = int(self._clock())
        if second != self._second:
            self._second, self._timestamp = second, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        return self._timestamp

    def _signing_key(self, secret_key: str, scope: str) -> bytes:
        """Return the key that signs requests of one day, region and service; the last one is kept."""
        if self._key[:2] != (secret_key, scope):
            key = f"AWS4{secret_key}".encode()
            for part in scope.split("/"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._key = secret_key, scope, key
        return self._key[2]
