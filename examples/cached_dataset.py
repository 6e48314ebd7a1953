"""Train on a data set that reads one object per sample from a slow bucket: directly, with IPDL, and with DELI."""

import io
import os
import time
from typing import Any

import boto3
import botocore.config
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from stoker_local import PROFILES, BucketConfig, bucket_process
from stoker_torch import CachedDataset, InformedDataLoader, MemoryCache, PrefetchSampler

SAMPLES, BATCH_SIZE, EPOCHS, STEP_SECONDS = 100, 10, 2, 0.2
THREADS = 16


class Objects(Dataset):
    """A map-style data set that sends a GET for each sample."""

    def __init__(self) -> None:
        self.client = boto3.client("s3", config=botocore.config.Config(max_pool_connections=THREADS))

    def __getitem__(self, index: int) -> dict[str, Any]:
        body = self.client.get_object(Bucket="stoker", Key=f"{index}.npy")["Body"].read()
        return {"image": torch.from_numpy(np.load(io.BytesIO(body), allow_pickle=False)), "label": index % 10}

    def __len__(self) -> int:
        return SAMPLES


def upload(client: Any) -> None:
    for index in range(SAMPLES):
        body = io.BytesIO()
        np.save(body, np.full((3, 32, 32), index, np.uint8))
        client.put_object(Bucket="stoker", Key=f"{index}.npy", Body=body.getvalue())


def train(name: str, loader: DataLoader) -> None:
    waited = 0.0
    for _ in range(EPOCHS):
        asked = time.perf_counter()
        for _batch in loader:
            waited += time.perf_counter() - asked
            time.sleep(STEP_SECONDS)  # the step, on a GPU
            asked = time.perf_counter()
    print(f"{name}: waited {waited:.2f} s in {EPOCHS} epochs")


def main() -> None:
    with bucket_process(BucketConfig()) as bucket:
        os.environ.update(bucket.environment())
        objects = Objects()
        upload(objects.client)
        bucket.reshape(PROFILES["cloud"])
        train("DataLoader", DataLoader(objects, BATCH_SIZE, shuffle=True))
        train("InformedDataLoader", InformedDataLoader(objects, BATCH_SIZE, shuffle=True, depth=2))
        with CachedDataset(objects, MemoryCache(50), threads=THREADS) as dataset:
            # 20 samples are fetched whenever 20 are left; the other 10 are for the batch that is being collated.
            order = RandomSampler(dataset)
            sampler = PrefetchSampler.half_and_half(order, dataset, unread_samples=BATCH_SIZE, epochs=EPOCHS)
            train("CachedDataset and PrefetchSampler", DataLoader(dataset, BATCH_SIZE, sampler=sampler))
            print(f"{dataset.stats().misses} of {dataset.stats().lookups} look-ups were misses")
        objects.client.close()


if __name__ == "__main__":
    main()
