"""URL schemes with their settings, caches with their policies, and parameters of requests to a served data set."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from stoker._cache.eviction import POLICIES, RENAMED_POLICIES
from stoker._cache.tiers import CacheSpec
from stoker._shared.client import ServerAddress
from stoker._stores.location import parse_url
from stoker.errors import ConfigError
from stoker_functions.serve import HttpError, Request
from stoker_functions.serve._messages import parse_request
from stoker_warm._config import WarmDeployment
from stoker_warm._tier import parse_server_url

__all__ = ["urls"]

_WARM = {
    "warm+lambda": "warm+lambda://stoker?listen=10.0.0.5:7411",
    "warm+gcf": "warm+gcf://stoker?listen=10.0.0.5:7411",
}
_STORES = ("folder", "file:///folder", "s3://bucket/data", "gs://bucket/data", "memory://bucket/data")
_FINGERPRINT = "ab" * 32
_SERVERS = ("http://127.0.0.1:7412", "https://10.0.0.5:7412", "warm://127.0.0.1:7412")
_SERVED = ("stoker+https://host/data", "stoker+http://127.0.0.1:8080/data")
_CACHES = ("disk:/folder?limit=20GB", "memory:?limit=2GB", "memory:?limit=node:2GB")


def urls(_: Path) -> Iterator[str]:
    """Return the supported ones; the settings of warm tiers and of requests are those that an error message lists."""
    for text in (*_STORES, *_SERVED):
        parse_url(text)
        yield f"store {text}"
    for scheme, text in _WARM.items():
        WarmDeployment.parse(text)
        yield from (f"tier {scheme}:// with {name}=" for name in _listed_settings(text))
    for text in _SERVERS:
        ServerAddress.parse(parse_server_url(text))
        yield f"tier {text}"
    for scheme in ("https", "warm"):
        ServerAddress.parse(parse_server_url(f"{scheme}://10.0.0.5:7412?fingerprint={_FINGERPRINT}"))
        yield f"tier {scheme}:// with fingerprint="
    for text in _CACHES:
        CacheSpec.parse(text)
        yield f"cache {text}"
        for policy in (*POLICIES, *RENAMED_POLICIES):
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                CacheSpec.parse(f"{text}&policy={policy}")
            yield f"cache {text}&policy={policy}"
    for path in ("manifest", "super-samples/0", "batches/0"):
        yield from (f"request /v1/NAME/{path} with {name}=" for name in _listed_parameters("GET", f"/v1/train/{path}"))
    yield from (f"request /v1/NAME/values with {name}=" for name in _listed_parameters("POST", "/v1/train/values"))


def _listed_settings(text: str) -> list[str]:
    try:
        WarmDeployment.parse(f"{text}{'&' if '?' in text else '?'}nothing=1")
    except ConfigError as error:
        return str(error).rpartition("; use ")[2].split(", ")
    raise AssertionError(f"{text} takes any setting")


def _listed_parameters(method: str, path: str) -> list[str]:
    try:
        parse_request(Request(method=method, path=path, query="nothing=1", headers={}))
    except HttpError as refusal:
        return str(refusal).rpartition("at most once: ")[2].split(", ")
    raise AssertionError(f"{path} takes any parameter")
