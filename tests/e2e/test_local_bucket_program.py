from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stoker_local import BucketConfig, BucketSpec, KeyPair, NetworkShape, bucket_process
from support.local_bucket import Served, s3_client, signed_request

COMMAND = [sys.executable, "-m", "stoker_local", "bucket"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_says_where_it_is_and_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    command = [*COMMAND, "--profile", "cloud", "--bucket", "one", "--bucket", "two"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        served = Served(process)
        with s3_client(served, aws_access_key_id=served.variables["AWS_ACCESS_KEY_ID"]) as client:
            assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["one", "two"]
        process.send_signal(number)
        assert process.communicate(timeout=300) == ("", "")
    assert process.returncode == 0


def test_the_program_says_nothing_of_clients_that_vanish_in_mid_body() -> None:
    command = [*COMMAND, "--bucket", "one"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        served = Served(process)
        with s3_client(served) as client:
            client.put_object(Bucket="one", Key="large", Body=bytes(16 << 20))
        address = urlsplit(served.url)
        for read_bytes in (0, 1 << 10, 1 << 20, 4 << 20) * 10:
            with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
                connection.sendall(signed_request(f"{served.url}/one/large"))
                while read_bytes > 0:
                    read_bytes -= len(connection.recv(read_bytes))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        process.terminate()
        assert process.communicate(timeout=300) == ("", "")


def test_a_folder_is_served_as_buckets(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "b.bin").write_bytes(b"content")
    command = [*COMMAND, "--root", str(tmp_path), "--anonymous"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        with s3_client(Served(process)) as client:
            assert client.get_object(Bucket="train", Key="a/b.bin")["Body"].read() == b"content"
        process.terminate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--root", "/does/not/exist"], "No such file"),
        (["--bucket", "A"], "not a bucket name"),
        (["--port", "-1"], "port must be at least 0 and at most 65,535, not -1"),
    ],
)
def test_a_mistake_is_reported_in_one_line(arguments: list[str], message: str) -> None:
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_bucket_process_serves_counts_and_ends_with_its_block() -> None:
    with bucket_process(BucketConfig(buckets=(BucketSpec(name="mine"),))) as bucket:
        with s3_client(bucket) as client:
            client.put_object(Bucket="mine", Key="k", Body=b"abc")
        assert bucket.counts()["requests"] == {"PutObject": 1}
        assert bucket.environment()["AWS_ENDPOINT_URL"] == bucket.url
        bucket.reset()
        assert bucket.counts()["bytes_in"] == 0
    with pytest.raises(ProcessLookupError):
        os.kill(bucket.pid, 0)


def test_a_bucket_process_is_reshaped_while_it_serves() -> None:
    with bucket_process() as bucket, s3_client(bucket) as client:
        client.put_object(Bucket="stoker", Key="k", Body=b"abc")
        for shape, tails in ((NetworkShape(tail_fraction=1.0, tail_seconds=0.001), 1), (NetworkShape(), 0)):
            bucket.reset()
            bucket.reshape(shape)
            assert client.get_object(Bucket="stoker", Key="k")["Body"].read() == b"abc"
            assert bucket.counts()["faults"].get("tail", 0) == tails


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b'{"warp": 9}', b'{"tail_fraction": "x"}', b'{"tail_fraction": 2}']
)
def test_what_is_no_shape_is_refused_and_changes_nothing(body: bytes) -> None:
    with bucket_process() as bucket:
        connection = HTTPConnection(urlsplit(bucket.url).netloc, timeout=60)
        connection.request("POST", "/-/shape", body)
        assert connection.getresponse().status == 400
        connection.close()
        assert bucket.counts()["faults"] == {}


def test_a_bucket_process_outlives_its_parent_by_nothing() -> None:
    script = """if True:
        import time
        from stoker_local import bucket_process
        with bucket_process() as bucket:
            print(bucket.url, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        address = urlsplit(parent.stdout.readline().strip())
        socket.create_connection((address.hostname, address.port)).close()
        parent.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address.hostname, address.port)).close()
        except ConnectionError:
            return
        time.sleep(0.01)
    pytest.fail("the bucket's process is still there")


def test_a_bucket_process_that_cannot_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    elsewhere = BucketConfig(host="192.0.2.1", keys=(KeyPair(access_key="a", secret_key="s"),))
    with pytest.raises(RuntimeError, match="did not start"), bucket_process(elsewhere):
        pytest.fail("nobody owns that address")
    assert "stoker_local:" in capfd.readouterr().err
