"""Keeps a GPU fed from a bucket: packs samples into super-samples and reads them in the order training asks for them.

The loader for PyTorch is the package ``stoker_torch``.
"""

from stoker.dataset import Dataset
from stoker.pack.packer import Packer
from stoker.sample_context import SampleContext
from stoker.schema import Array, Bytes, Ragged, Schema, Text
from stoker.store import GcsOptions, S3Options, ServedOptions, open_store
from stoker.version import __version__

__all__ = [
    "Array",
    "Bytes",
    "Dataset",
    "GcsOptions",
    "Packer",
    "Ragged",
    "S3Options",
    "SampleContext",
    "Schema",
    "ServedOptions",
    "Text",
    "__version__",
    "open",
    "open_store",
]

open = Dataset  # noqa: A001 - stoker.open(url)[i] is what people try; nothing in this module opens a file
