"""PyTorch front of stoker: the loader, a data set for DataLoader, and sample caches for existing data sets."""

from stoker._base.checksum import use_awscrt
from stoker.errors import MissingExtraError

try:
    from stoker_torch._cached_dataset import CachedDataset, PrefetchSampler
    from stoker_torch._config import LoaderConfig, StreamConfig
    from stoker_torch._device_images import DeviceImageDecoder
    from stoker_torch._device_stage import DeviceStage
    from stoker_torch._disk_cache import DiskCache
    from stoker_torch._informed_loader import InformedDataLoader
    from stoker_torch._loader import Loader
    from stoker_torch._options import Budget, WorkerOptions
    from stoker_torch._sample_cache import CacheStatistics, MemoryCache
    from stoker_torch._state import Preemption, merge_states, save_on_sigterm
    from stoker_torch._statistics import LoaderPlan, LoaderStatistics
    from stoker_torch._stream_dataset import StreamDataset
    from stoker_torch._tensors import RaggedColumn
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "torch":
        raise
    raise MissingExtraError(
        "stoker_torch needs PyTorch, which is not installed: pip install 'stoker[torch]'"
    ) from error

use_awscrt()  # here, since the first batch would wait for its import

__all__ = [
    "Budget",
    "CacheStatistics",
    "CachedDataset",
    "DeviceImageDecoder",
    "DeviceStage",
    "DiskCache",
    "InformedDataLoader",
    "Loader",
    "LoaderConfig",
    "LoaderPlan",
    "LoaderStatistics",
    "MemoryCache",
    "Preemption",
    "PrefetchSampler",
    "RaggedColumn",
    "StreamConfig",
    "StreamDataset",
    "WorkerOptions",
    "merge_states",
    "save_on_sigterm",
]
