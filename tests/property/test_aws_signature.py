"""The signatures of reads are those that botocore computes."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from stoker._stores.aws_signature import ReadSigner

WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
MOMENT = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)


@given(
    keys=st.builds(ReadOnlyCredentials, WORDS, WORDS, st.none() | WORDS),
    region=WORDS.filter(lambda word: "/" not in word),
    method=st.sampled_from(["GET", "HEAD"]),
    key=st.text(min_size=1, max_size=20).filter(lambda key: key.isprintable()),
    headers=st.dictionaries(st.sampled_from(["Range", "If-Match", "x-amz-request-payer"]), WORDS),
)
def test_a_read_is_signed_as_botocore_signs_it(
    keys: ReadOnlyCredentials, region: str, method: str, key: str, headers: dict[str, str]
) -> None:
    path = f"/bucket/{quote(key, safe='-_.~/')}"
    request = AWSRequest(method=method, url=f"http://host:9000{path}", headers=dict(headers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda: MOMENT)
        S3SigV4Auth(keys, "s3", region).add_auth(request)
    signed = ReadSigner(region, clock=MOMENT.timestamp).sign(keys, method, "host:9000", path, headers)
    assert signed == dict(request.headers.items())


def test_a_later_signature_has_a_later_date() -> None:
    keys, seconds = ReadOnlyCredentials("key", "secret", None), iter([0.5, 1.0, 86400.0])
    signer = ReadSigner("us-east-1", clock=lambda: next(seconds))
    dates = [signer.sign(keys, "GET", "host", "/key", {})["X-Amz-Date"] for _ in range(3)]
    assert dates == ["19700101T000000Z", "19700101T000001Z", "19700102T000000Z"]
