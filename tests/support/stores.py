"""Places to run the store contract in, and functions to inspect stores."""

from stoker.testing import Deviation, list_keys, read_range, run_check
from stoker.testing import StoreLocation as Place

__all__ = ["Deviation", "Place", "list_keys", "read_range", "run_check"]
