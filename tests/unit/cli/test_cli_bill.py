"""Reported requests and dollars of commands, compared with the bucket's counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from stoker import Operation, Prices, cli
from stoker_local import BucketConfig, LocalBucket, running_bucket

_OPERATIONS = {
    "GetObject": Operation.GET,
    "HeadObject": Operation.HEAD,
    "PutObject": Operation.PUT,
    "ListObjectsV2": Operation.LIST,
    "ListMultipartUploads": Operation.LIST,
    "DeleteObject": Operation.DELETE,
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[LocalBucket]:
    with running_bucket(BucketConfig()) as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environment().items():
            patch.setenv(name, value)
        yield bucket


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "command",
    [
        "pack {source} {url}/other",
        "verify {url}",
        "compact {url} --super-sample-bytes 64KiB",
        "gc {url}",
        "gc {url} --keep-versions 1 --delete",
    ],
)
def test_requests_and_dollars_are_those_that_the_bucket_counts(
    bucket: LocalBucket, command: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = BytesIO()
    np.save(data, np.arange(3000))
    name = f"bill/{command.split()[0]}-{len(command)}-{as_json}"
    bucket.put("stoker", f"{name}/x.npy", data.getvalue())
    source, url = f"s3://stoker/{name}/x.npy", f"s3://stoker/{name}-packed"
    for mode in ("--quiet", "--overwrite"):
        assert cli.main(["pack", source, url, mode, "--super-sample-bytes", "8KiB"]) == 0
    capsys.readouterr()
    before = Counter(bucket.counts.requests)
    arguments = [*command.format(source=source, url=url).split(), *(["--json"] if as_json else [])]
    assert cli.main(arguments) == 0
    sent: Counter[Operation] = Counter()
    for name, count in (bucket.counts.requests - before).items():
        sent[_OPERATIONS[name]] += count
    dollars = sum(count * Prices.load().store("s3").request_dollars(operation) for operation, count in sent.items())
    shown = capsys.readouterr()
    assert dollars > 0
    if as_json:
        bill = json.loads(shown.out)
        assert bill["requests"] == {str(operation): count for operation, count in sent.items()}
        assert bill["dollars"] == pytest.approx(dollars)
    else:
        lines = [line for line in (shown.out + shown.err).splitlines() if " to stores (" in line]
        assert len(lines) == 1
        assert lines[0].startswith(f"{sum(sent.values())} requests to stores (")
        assert lines[0].endswith(f"), ${dollars:.6f}")


def test_a_local_data_set_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.arange(30))
    assert cli.main(["pack", str(tmp_path / "x.npy"), str(tmp_path / "packed"), "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    packed = json.loads(shown.out)
    assert (packed["samples"], packed["version"], packed["dollars"], shown.err) == (30, 1, 0.0, "")
    assert cli.main(["verify", str(tmp_path / "packed")]) == 0
    assert "$" not in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path / "packed"), "--json"]) == 0
    shown = capsys.readouterr()
    assert (json.loads(shown.out)["bad"], shown.err) == ([], "")
