"""Places to run the store contract in, and functions to inspect stores."""

from stoker.testing import Deviation, keys_of, read_range, run_with
from stoker.testing import StorePlace as Place

__all__ = ["Deviation", "Place", "keys_of", "read_range", "run_with"]
