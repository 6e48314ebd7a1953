"""What a failure of Google's token endpoints means, and whether this machine has one of its own."""

from __future__ import annotations

import json
import os

import aiohttp

from stoker._stores.failures import Failure, error_of
from stoker._stores.network import machine_vendor
from stoker.errors import ConnectionLostError, ServerError, TransientError

__all__ = ["is_google_machine", "transient_failure"]

_ENDPOINT = "Google's token endpoint"
_VARIABLES = ("GCE_METADATA_HOST", "K_SERVICE", "CLOUD_RUN_JOB")


def transient_failure(error: Exception) -> TransientError | None:
    """Return our error for a failure of Google's token endpoint that may pass; None for a refusal."""
    if isinstance(error, json.JSONDecodeError) or (
        isinstance(error, aiohttp.ClientResponseError) and error.status < 300
    ):
        return ServerError(f"{_ENDPOINT}: the answer is no token; a proxy or portal on the way may have given it")
    if isinstance(error, aiohttp.ClientResponseError):
        found = error_of(Failure(address=_ENDPOINT, status=error.status, headers=error.headers or {}), {})
        return found if isinstance(found, TransientError) else None
    if isinstance(error, aiohttp.ClientError | TimeoutError):
        # Its class and text, since some of these have no text.
        return ConnectionLostError(f"{_ENDPOINT} could not be reached: {type(error).__name__}: {error}")
    return None


def is_google_machine() -> bool:
    """Return whether this is a machine, container or function of Google's, which has an account to ask for tokens."""
    return any(map(os.environ.get, _VARIABLES)) or machine_vendor() == "Google"
