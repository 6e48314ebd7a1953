"""Trains PyTorch models from a bucket: the loader, and what its batches are made of."""

from stoker_torch.config import LoaderConfig
from stoker_torch.loader import Loader
from stoker_torch.plan import LoaderPlan
from stoker_torch.preempt import Preemption, save_on_sigterm
from stoker_torch.statistics import LoaderStatistics
from stoker_torch.stream_dataset import StreamDataset
from stoker_torch.stream_state import merge_states
from stoker_torch.tensors import RaggedColumn

__all__ = [
    "Loader",
    "LoaderConfig",
    "LoaderPlan",
    "LoaderStatistics",
    "Preemption",
    "RaggedColumn",
    "StreamDataset",
    "merge_states",
    "save_on_sigterm",
]
