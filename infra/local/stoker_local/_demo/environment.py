"""What surrounds the demo while it runs: AWS clients that are led to its bucket, and a PyTorch that keeps quiet."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch

__all__ = ["led_to", "quiet_torch"]


@contextmanager
def led_to(variables: Mapping[str, str]) -> Iterator[None]:
    """Lead AWS clients to the local bucket, whatever the user's own settings are, and PyTorch's cache to its end."""
    before = dict(os.environ)
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "NO_PROXY": "127.0.0.1"}
    cache = TemporaryDirectory(prefix="stoker-demo-", ignore_cleanup_errors=True)
    try:
        for name in before:
            if name.startswith("AWS_") or name.lower() == "no_proxy":
                del os.environ[name]
        os.environ.update(nowhere | {"TORCHINDUCTOR_CACHE_DIR": cache.name} | dict(variables))
        yield
    finally:
        cache.cleanup()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Let the model compute on one core, so that what feeds it has another and no idle thread spins for work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # It advises a worker per core; these wait for the network, and their best number is found by trying.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            yield
    finally:
        torch.set_num_threads(before)
