"""Where a deployment keeps the pack records of its data sets: in the bucket, or in Redis."""

from __future__ import annotations

from stoker._base.retry import RetryingStore
from stoker._pack.catalog import BucketCatalog, Catalog
from stoker.errors import MissingExtraError
from stoker_functions._settings import Settings

__all__ = ["Catalog", "open_catalog"]


def open_catalog(store: RetryingStore, settings: Settings) -> Catalog:
    """Return the catalog of the data set in ``store``; nothing is connected to before its first use.

    Raises:
        MissingExtraError: Redis is wanted and its client is not installed.
    """
    if settings.catalog == "bucket":
        return BucketCatalog(store)
    try:
        from stoker_functions._catalog.redis import RedisCatalog
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"a catalog in Redis needs {error.name}; pip install 'stoker[redis]'") from error
    return RedisCatalog(store, settings.catalog, password=settings.catalog_password)
