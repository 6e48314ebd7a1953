"""A local Google Cloud Storage."""

from stoker_local.gcs.server import GcsConfig, LocalGcs

__all__ = ["GcsConfig", "LocalGcs"]
