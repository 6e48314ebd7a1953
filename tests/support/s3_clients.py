"""Other S3 clients, behind one interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import obstore
from obstore.store import S3Store as ObstoreStore
from s3fs import S3FileSystem

from stoker_local import LocalBucket

__all__ = ["CLIENTS", "S3Client", "open_client"]

_PART_BYTES = 5 << 20


class S3Client(Protocol):
    """A client of the bucket ``stoker``."""

    def write(self, key: str, data: bytes) -> None: ...

    def read(self, key: str) -> bytes: ...

    def read_range(self, key: str, start: int, end: int) -> bytes: ...

    def list(self, prefix: str) -> list[str]: ...

    def delete(self, key: str) -> None: ...


class _Obstore:
    def __init__(self, bucket: LocalBucket) -> None:
        self._store = ObstoreStore(
            "stoker",
            endpoint=bucket.url,
            region="us-east-1",
            access_key_id="stoker",
            secret_access_key="stoker-secret",
            client_options={"allow_http": True},
        )

    def write(self, key: str, data: bytes) -> None:
        obstore.put(self._store, key, data, chunk_size=_PART_BYTES)

    def read(self, key: str) -> bytes:
        return bytes(obstore.get(self._store, key).bytes())

    def read_range(self, key: str, start: int, end: int) -> bytes:
        return bytes(obstore.get_range(self._store, key, start=start, end=end))

    def list(self, prefix: str) -> list[str]:
        return [entry["path"] for entry in obstore.list(self._store, prefix).collect()]

    def delete(self, key: str) -> None:
        obstore.delete(self._store, key)


class _S3fs:
    def __init__(self, bucket: LocalBucket) -> None:
        self.file_system = S3FileSystem(
            key="stoker",
            secret="stoker-secret",
            endpoint_url=bucket.url,
            client_kwargs={"region_name": "us-east-1"},
            skip_instance_cache=True,
            default_block_size=_PART_BYTES,
        )

    def write(self, key: str, data: bytes) -> None:
        with self.file_system.open(f"stoker/{key}", "wb") as file:
            for start in range(0, len(data), _PART_BYTES):  # a single write is one part
                file.write(data[start : start + _PART_BYTES])

    def read(self, key: str) -> bytes:
        data: bytes = self.file_system.cat_file(f"stoker/{key}")
        return data

    def read_range(self, key: str, start: int, end: int) -> bytes:
        data: bytes = self.file_system.cat_file(f"stoker/{key}", start=start, end=end)
        return data

    def list(self, prefix: str) -> list[str]:
        self.file_system.invalidate_cache()  # others have written
        return [path.removeprefix("stoker/") for path in self.file_system.find(f"stoker/{prefix}")]

    def delete(self, key: str) -> None:
        self.file_system.rm_file(f"stoker/{key}")


class _TorchConnector:
    """s3torchconnector, which reads its credentials from the environment; its transport is the AWS CRT."""

    def __init__(self, bucket: LocalBucket) -> None:
        # Imported here, because the import registers fork handlers for the whole process.
        from s3torchconnector import S3Checkpoint, S3ClientConfig, S3MapDataset
        from s3torchconnector._s3client import S3Client as Crt  # the public interface deletes nothing

        config = S3ClientConfig(force_path_style=True, part_size=_PART_BYTES)
        self._files = S3Checkpoint("us-east-1", endpoint=bucket.url, s3client_config=config)
        self._client = Crt("us-east-1", endpoint=bucket.url, s3client_config=config)
        self._dataset: Any = S3MapDataset
        self._where = {"region": "us-east-1", "endpoint": bucket.url, "s3client_config": config}

    def write(self, key: str, data: bytes) -> None:
        with self._files.writer(f"s3://stoker/{key}") as file:
            file.write(data)

    def read(self, key: str) -> bytes:
        with self._files.reader(f"s3://stoker/{key}") as file:
            data: bytes = file.read()
        return data

    def read_range(self, key: str, start: int, end: int) -> bytes:
        with self._files.reader(f"s3://stoker/{key}") as file:
            file.seek(start)
            data: bytes = file.read(end - start)
        return data

    def list(self, prefix: str) -> list[str]:
        found = self._dataset.from_prefix(f"s3://stoker/{prefix}", **self._where)
        return [found[number].key for number in range(len(found))]

    def delete(self, key: str) -> None:
        self._client.delete_object("stoker", key)


CLIENTS = ("obstore", "s3fs", "s3torchconnector")


@contextmanager
def open_client(name: str, bucket: LocalBucket) -> Iterator[S3Client]:
    """Open the client of that name."""
    if name == "obstore":
        yield _Obstore(bucket)
    elif name == "s3fs":
        client = _S3fs(bucket)
        yield client
        client.file_system.close_session(client.file_system.loop, client.file_system.s3)
    else:
        yield _TorchConnector(bucket)
