"""Traces of real runs: a killed run leaves its trace, and a slow bucket is reported as the bottleneck."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import stoker
from stoker import FetchConfig
from stoker._trace.recording import Recording
from stoker.cli import main
from stoker.trace import read_trace
from stoker_local import BucketConfig, NetworkShape, running_bucket
from stoker_local._bucket import client_environment
from stoker_torch import Loader
from support.processes import child_process, wait_for_end
from support.traced_training import train_and_die

SLOW_SECONDS = 0.1
SCHEMA = {"x": stoker.Array("uint8", (10_000,))}


def pack(url: str) -> str:
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=1_000_000) as packer:
        packer.extend({"x": bytes_of(number)} for number in range(300))
    return url


def bytes_of(number: int) -> NDArray[np.uint8]:
    return np.full(10_000, number % 256, np.uint8)


def test_a_killed_training_leaves_a_trace_that_can_be_viewed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, trace = pack(str(tmp_path / "ds")), tmp_path / "trace.json"
    with child_process(train_and_die, url, trace) as process:
        assert wait_for_end(process) == -9
    assert main(["trace", "view", str(trace)]) == 0
    assert "worst waits" in capsys.readouterr().out
    recording = Recording.of(read_trace(trace))
    assert len(recording.waits) > 20
    assert recording.fetches


@pytest.mark.parametrize(
    ("shape", "phase"),
    [
        (NetworkShape(first_byte_seconds=0.2), "first_byte"),
        (NetworkShape(connection_bytes_per_second=4_000_000, software_pacing=True), "transfer"),
    ],
    ids=["first_byte", "transfer"],
)
def test_the_bottleneck_of_a_bucket_is_reported(
    shape: NetworkShape, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BucketConfig()
    with running_bucket(config) as bucket:
        for name, value in client_environment(config, bucket.url).items():
            monkeypatch.setenv(name, value)
        url = pack("s3://stoker/ds")
        bucket.reshape(shape)
        fetch = FetchConfig(hedge=False)
        with Loader(url, batch_size=100, fetch=fetch, trace=tmp_path / "trace.json") as loader:
            for _ in loader:
                pass
            stats = loader.stats()
        keys = {loader.manifest.key(row) for row in range(len(loader.manifest))}
    # How long everything else takes is up to the machine.
    assert stats.waits[phase] >= SLOW_SECONDS
    causes = [next(iter(wait.by_cause())) for wait in stats.worst_waits]
    assert any(told == phase and key in keys for told, key in causes)
    assert math.fsum(stats.waits.values()) == pytest.approx(stats.wait_seconds)
    secret = config.keys[0].secret_key
    text = (tmp_path / "trace.json").read_text()
    assert secret not in text
    assert "http" not in text
