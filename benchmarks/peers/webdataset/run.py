"""WebDataset: tar shards read sequentially, the shards shuffled and the samples mixed in a buffer.

See README.md beside this folder for the settings. A shard is read through boto3, since the library has no reader of
its own for S3 (its documentation registers one like this, or pipes the AWS command line's output).
"""

from __future__ import annotations

import io
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import boto3
import webdataset as wds
from common import Packing, Running, bucket_and_prefix, main, restore
from torch.utils.data import DataLoader

SHARD_BYTES = 16 << 20
BUFFER_SAMPLES = 1000
READ_BYTES = 1 << 20


@cache
def client() -> Any:
    """Return this process's client; workers are forked before its first call."""
    return boto3.client("s3")


def open_s3(url: str, mode: str = "rb", bufsize: int = 8192) -> io.BufferedReader:
    bucket, key = bucket_and_prefix(url)
    return io.BufferedReader(client().get_object(Bucket=bucket, Key=key)["Body"], READ_BYTES)


wds.gopen_schemes["s3"] = open_s3


def shards(url: str) -> list[str]:
    bucket, prefix = bucket_and_prefix(url)
    s3 = boto3.client("s3")
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    found = [f"s3://{bucket}/{stored['Key']}" for page in pages for stored in page["Contents"]]
    s3.close()
    return found


def pack(packing: Packing) -> None:
    bucket, prefix = bucket_and_prefix(packing.url)
    s3 = boto3.client("s3")
    with TemporaryDirectory() as folder:
        with wds.ShardWriter(f"{folder}/%06d.tar", maxsize=SHARD_BYTES, mtime=0, verbose=0) as writer:
            for data, label in packing.samples():
                content = data if isinstance(data, bytes) else data.tobytes()
                writer.write({"__key__": f"{label:08d}", "bin": content, "cls": label})
        for path in sorted(Path(folder).iterdir()):
            s3.upload_file(str(path), bucket, f"{prefix}/{path.name}")


def loader(running: Running) -> DataLoader[Any]:
    dataset = (
        wds.WebDataset(shards(running.url), shardshuffle=100, detshuffle=True, seed=running.seed)
        .compose(wds.detshuffle(BUFFER_SAMPLES, seed=running.seed))
        .to_tuple("bin", "cls")
        .map_tuple(restore(running.workload, running.decoded), int)
        .batched(running.batch)
    )
    return DataLoader(dataset, batch_size=None, num_workers=running.workers, persistent_workers=running.workers > 0)


if __name__ == "__main__":
    main(pack, loader)
