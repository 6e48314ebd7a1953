"""Keeps a GPU fed from a bucket."""

from stoker.version import __version__

__all__ = ["__version__"]
