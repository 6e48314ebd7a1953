"""One object and one GET per sample: a shuffled map-style data set in torch's own DataLoader.

``--workers`` is the number of workers; objects need many, since each waits for one response at a time. See README.md in
the folder above.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import boto3
import numpy as np
import torch
from botocore.config import Config
from common import Packing, Running, bucket_and_prefix, main, restore
from torch.utils.data import DataLoader, Dataset

UPLOADS = 8
COUNT = "samples"


@cache
def client() -> Any:
    """Return this process's client; workers are forked before its first call."""
    return boto3.client("s3", config=Config(max_pool_connections=UPLOADS))


class Objects(Dataset[tuple[np.ndarray | bytes, int]]):
    """The samples under a URL; an object's name is its sample's number."""

    def __init__(self, running: Running) -> None:
        self._bucket, self._prefix = bucket_and_prefix(running.url)
        self._restore = restore(running.workload, running.decoded)
        # Not this module's client: an open connection must not be inherited by the workers.
        s3 = boto3.client("s3")
        self._samples = int(s3.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{COUNT}")["Body"].read())
        s3.close()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> tuple[np.ndarray | bytes, int]:
        answer = client().get_object(Bucket=self._bucket, Key=f"{self._prefix}/{i:08d}")
        return self._restore(answer["Body"].read()), i


def pack(packing: Packing) -> None:
    bucket, prefix = bucket_and_prefix(packing.url)
    samples, s3 = packing.samples(), client()

    def put(i: int) -> None:
        data, label = samples[i]
        content = data if isinstance(data, bytes) else data.tobytes()
        s3.put_object(Bucket=bucket, Key=f"{prefix}/{label:08d}", Body=content)

    with ThreadPoolExecutor(UPLOADS) as pool:
        for _ in pool.map(put, range(len(samples))):
            pass
    s3.put_object(Bucket=bucket, Key=f"{prefix}/{COUNT}", Body=str(len(samples)).encode())


def loader(running: Running) -> DataLoader[Any]:
    return DataLoader(
        Objects(running),
        batch_size=running.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(running.seed),
        num_workers=running.workers,
        persistent_workers=running.workers > 0,
    )


if __name__ == "__main__":
    main(pack, loader)
