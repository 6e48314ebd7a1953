import base64
import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_local._http1 import ServerRequest
from stoker_local._s3.model import S3Error
from stoker_local._s3.signature import decode_payload


def _request(**headers: str) -> ServerRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ServerRequest(
        method="PUT", raw_path="/b/k", path="/b/k", query=(), headers=named, body_bytes=0, keep_alive=True
    )


def _chunked(parts: list[bytes], *trailer: str) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part)
    return chunks + b"0\r\n" + "".join(f"{line}\r\n" for line in trailer).encode() + b"\r\n"


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


STREAMING = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_chunks_are_joined_and_the_trailing_checksum_holds(parts: list[bytes]) -> None:
    data = b"".join(parts)
    request = _request(x_amz_content_sha256=STREAMING, x_amz_decoded_content_length=str(len(data)))
    assert bytes(decode_payload(request, _chunked(parts, f"x-amz-checksum-crc32:{_crc32(data)}"))) == data


def test_a_wrong_trailing_checksum_is_refused() -> None:
    with pytest.raises(S3Error, match="BadDigest"):
        decode_payload(
            _request(x_amz_content_sha256=STREAMING), _chunked([b"abc"], f"x-amz-checksum-crc32:{_crc32(b'abd')}")
        )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"3\r\nabc",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"x\r\n",
        b"-1\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"4\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_malformed_chunks_are_refused(body: bytes) -> None:
    with pytest.raises(S3Error, match="InvalidRequest"):
        decode_payload(_request(x_amz_content_sha256=STREAMING), body)


def test_a_decoded_length_that_is_wrong_is_refused() -> None:
    with pytest.raises(S3Error, match="InvalidRequest"):
        decode_payload(_request(x_amz_content_sha256=STREAMING, x_amz_decoded_content_length="4"), _chunked([b"abc"]))


def test_a_signed_payload_must_have_its_digest() -> None:
    digest = hashlib.sha256(b"abc").hexdigest()
    assert decode_payload(_request(x_amz_content_sha256=digest), b"abc") == b"abc"
    with pytest.raises(S3Error, match="XAmzContentSHA256Mismatch"):
        decode_payload(_request(x_amz_content_sha256=digest), b"abd")


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("content_md5", hashlib.md5(b"abc", usedforsecurity=False).digest()),
        ("x_amz_checksum_sha1", hashlib.sha1(b"abc", usedforsecurity=False).digest()),
        ("x_amz_checksum_sha256", hashlib.sha256(b"abc").digest()),
        ("x_amz_checksum_crc32", zlib.crc32(b"abc").to_bytes(4, "big")),
        ("x_amz_checksum_crc32c", bytes.fromhex("364b3fb7")),
    ],
)
def test_every_announced_checksum_is_verified(name: str, digest: bytes) -> None:
    request = _request(**{name: base64.b64encode(digest).decode()})
    assert decode_payload(request, b"abc") == b"abc"
    with pytest.raises(S3Error, match="BadDigest"):
        decode_payload(request, b"abd")


def test_a_checksum_that_is_not_base64_is_refused() -> None:
    with pytest.raises(S3Error, match="InvalidDigest"):
        decode_payload(_request(content_md5="***"), b"abc")


def test_signed_chunks_are_refused_by_name() -> None:
    with pytest.raises(S3Error, match="NotImplemented"):
        decode_payload(_request(x_amz_content_sha256="STREAMING-AWS4-HMAC-SHA256-PAYLOAD"), b"")
