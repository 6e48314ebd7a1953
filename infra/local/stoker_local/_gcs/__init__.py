"""A local Google Cloud Storage."""

from stoker_local._gcs.server import GcsConfig, LocalGcs

__all__ = ["GcsConfig", "LocalGcs"]
