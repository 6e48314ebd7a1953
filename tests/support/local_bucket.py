"""Clients of the local bucket: boto3's, stoker's own, and requests signed by botocore for raw sockets."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import boto3  # type: ignore[import-untyped]  # it ships no types
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from stoker import S3Options

__all__ = ["Endpoint", "Served", "exchange", "s3_client", "s3_options", "signed_headers", "signed_request"]


class Endpoint(Protocol):
    """A server of S3, in this process or another."""

    @property
    def url(self) -> str: ...


class Served:
    """A program of a local cloud, which prints the command that sets a shell's variables for it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        command, *words = process.stdout.readline().split()
        assert command == "export"
        self.variables = dict(word.split("=", 1) for word in words)
        self.url = self.variables["AWS_ENDPOINT_URL"]


@contextmanager
def s3_client(endpoint: Endpoint, **changes: Any) -> Iterator[Any]:
    """Yield a boto3 client with the default keys that does not retry."""
    settings: dict[str, Any] = {
        "endpoint_url": endpoint.url,
        "aws_access_key_id": "stoker",
        "aws_secret_access_key": "stoker-secret",
        "region_name": "us-east-1",
        "config": Config(retries={"total_max_attempts": 1}, connect_timeout=60, read_timeout=60),
    }
    client = boto3.client("s3", **{**settings, **changes})
    try:
        yield client
    finally:
        client.close()


def s3_options(endpoint: Endpoint) -> S3Options:
    """Return options of stoker's own stores with the default keys."""
    return S3Options(
        endpoint_url=endpoint.url, region="us-east-1", access_key_id="stoker", secret_access_key="stoker-secret"
    )


def signed_headers(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    data: bytes = b"",
    credentials: Credentials | None = None,
    region: str = "us-east-1",
) -> dict[str, str]:
    """Return the headers of a request, with ``Host`` and the signature of botocore's own signer."""
    host = {"Host": urlsplit(url).netloc}
    request = AWSRequest(method=method, url=url, headers={**host, **(headers or {})}, data=data)
    signer = S3SigV4Auth(credentials or Credentials("stoker", "stoker-secret"), "s3", region)
    signer.add_auth(request)
    return dict(request.headers.items())


def signed_request(url: str, *, method: str = "GET", data: bytes = b"", **signing: Any) -> bytes:
    """Return a signed request as bytes, which asks the server to close the connection."""
    signed = signed_headers(url, method=method, data=data, **signing)
    headers = {**signed, "Connection": "close", "Content-Length": str(len(data))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    target = url.removeprefix(f"http://{headers['Host']}")
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode() + data


def exchange(endpoint: Endpoint, request: bytes) -> bytes:
    """Send bytes and return all bytes that the server sends until it closes.

    Raises:
        ConnectionResetError: the server reset the connection.
    """
    host, _, port = urlsplit(endpoint.url).netloc.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
