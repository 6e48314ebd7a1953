"""Keeps a GPU fed from a bucket: packs samples into super-samples and reads them in the order training asks for them.

The loader for PyTorch is the package ``stoker_torch``.
"""

from stoker._dataset import Dataset
from stoker._format.schema import Array, Bytes, Ragged, Schema, Text
from stoker._order.random_words import SampleContext
from stoker._pack.packer import Packer
from stoker._stores import GcsOptions, S3Options, ServedOptions, open_store
from stoker._version import __version__

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
