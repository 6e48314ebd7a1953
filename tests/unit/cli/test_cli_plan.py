"""``stoker plan``: its output, and the accuracy for real runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker import FetchConfig, NextBatch
from stoker.cli import main
from stoker_local import LocalBucket, NetworkShape, running_bucket
from stoker_torch import Loader

SAMPLES = 1500
GIVEN = ["--gpu-rate", "5000", "--first-byte", "50", "--bandwidth", "200MB", "--memory", "1GB"]


def pack(url: str, super_sample_bytes: int) -> None:
    schema = {"data": stoker.Array("uint8", (2048,)), "label": stoker.Array("int64")}
    rng = np.random.default_rng(0)
    with stoker.Packer(url, schema=schema, super_sample_bytes=super_sample_bytes) as packer:
        packer.extend({"data": rng.integers(0, 256, 2048, dtype=np.uint8), "label": label} for label in range(SAMPLES))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBucket]:
    with running_bucket() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def gets(bucket: LocalBucket, url: str, **settings: Any) -> int:
    """Return how many requests two epochs take, and take them."""
    before = bucket.counts.requests["GetObject"]
    with Loader(url, batch_size=100, epochs=2, fetch=FetchConfig(hedge=False), **settings) as loader:
        labels = [int(label) for _ in range(2) for batch in loader for label in batch["label"]]
    assert sorted(labels) == sorted([*range(SAMPLES)] * 2)
    return bucket.counts.requests["GetObject"] - before


def test_following_the_advice_saves_the_requests_that_were_predicted(
    bucket: LocalBucket, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "s3://stoker/data"
    pack(url, 8192)
    bad = ("--batch-size", "100", "--window", "1", "--loader-memory", "4MB", "--schedule", "next-batch")
    found = planned(capsys, url, *GIVEN, *bad)
    changes = {each["name"]: each for each in found["suggestions"] if each["is_change"]}
    assert {"super-sample size", "window", "schedule"} <= set(changes)
    given = gets(bucket, url, window=1, memory="4MB", schedule=NextBatch())
    command = changes["super-sample size"]["command"].replace("URL", url).split()
    assert command[:2] == ["stoker", "compact"]
    assert main(command[1:]) == 0
    capsys.readouterr()
    advised = gets(bucket, url, window=int(changes["window"]["advised"]))
    manifest = 1
    assert given == pytest.approx(2 * found["given"]["later"]["requests"] + manifest, rel=0.02)
    assert advised <= 2 * found["advised"]["later"]["requests"] + manifest + 2
    assert advised < given / 5
    again = planned(capsys, url, *GIVEN, "--batch-size", "100")
    assert not [each for each in again["suggestions"] if each["is_change"]]


def test_a_bucket_is_measured_within_what_was_allowed(bucket: LocalBucket, capsys: pytest.CaptureFixture[str]) -> None:
    pack("s3://stoker/data", 1 << 20)
    bucket.reshape(NetworkShape(first_byte_seconds=0.01))
    before, sent = bucket.counts.requests["GetObject"], bucket.counts.bytes_out
    found = planned(capsys, "s3://stoker/data", "--gpu-rate", "5000", "--probe", "4MB")
    measured = found["probe"]
    assert bucket.counts.requests["GetObject"] - before == measured["requests"] + 1
    assert measured["read_bytes"] <= 4_000_000
    assert bucket.counts.bytes_out - sent >= measured["read_bytes"]
    assert min(measured["first_byte_seconds"]) >= 0.01


def test_given_figures_send_no_request_but_for_the_manifest(
    bucket: LocalBucket, capsys: pytest.CaptureFixture[str]
) -> None:
    pack("s3://stoker/data", 1 << 20)
    before = bucket.counts.requests["GetObject"]
    assert planned(capsys, "s3://stoker/data", *GIVEN)["probe"] is None
    assert bucket.counts.requests["GetObject"] == before + 1


def test_money_is_what_requests_and_waiting_cost(bucket: LocalBucket, capsys: pytest.CaptureFixture[str]) -> None:
    pack("s3://stoker/data", 64 << 10)
    slow = ("--gpu-rate", "100000", "--first-byte", "50", "--bandwidth", "1MB", "--memory", "256MB")
    later = planned(capsys, "s3://stoker/data", *slow, "--nodes", "2", "--price-of-hour", "36")["given"]["later"]
    assert later["waiting_dollars"] == pytest.approx(later["wait_seconds"] * 2 * 0.01)
    assert later["dollars"] == pytest.approx(later["requests"] * 0.0004 / 1000)
    away = planned(capsys, "s3://stoker/data", *slow, "--egress", "internet")["given"]["later"]
    assert away["dollars"] > later["dollars"]


def test_columns_that_are_read_are_planned(bucket: LocalBucket, capsys: pytest.CaptureFixture[str]) -> None:
    url = "s3://stoker/data"
    names = [f"f{number}" for number in range(20)]
    schema = {name: stoker.Array("float64") for name in names} | {"image": stoker.Array("uint8", (2048,))}
    image = np.zeros(2048, np.uint8)
    with stoker.Packer(url, schema=schema, super_sample_bytes=1 << 19) as packer:
        packer.extend({"image": image} | dict.fromkeys(names, float(number)) for number in range(SAMPLES))
    found = planned(capsys, url, *GIVEN, "--batch-size", "100", "--columns", "f0,f1")["given"]
    before, sent = bucket.counts.requests["GetObject"], bucket.counts.bytes_out
    with Loader(url, batch_size=100, columns=["f0", "f1"], epochs=1, fetch=FetchConfig(hedge=False)) as loader:
        assert sum(len(batch["f0"]) for batch in loader) == SAMPLES
        plan = loader.plan
    manifest = 1
    assert bucket.counts.requests["GetObject"] - before == plan.get_requests + manifest
    assert plan.get_requests == found["later"]["requests"]
    assert bucket.counts.bytes_out - sent == pytest.approx(found["later"]["read_bytes"], rel=0.2)
    assert found["later"]["read_bytes"] < 0.3 * planned(capsys, url, *GIVEN)["given"]["later"]["read_bytes"]


COSTS = {"request": 1e5, "gb": 1e3, "batch": 5e4, "value": 1e6, "gathered-gb": 1e3, "new-gb": 1e3}


def test_each_processor_time_makes_a_training_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "data")
    pack(url, 64 << 10)

    def predicted(costs: dict[str, float], *arguments: str) -> tuple[float, float]:
        flags = [part for name in COSTS for part in (f"--cpu-per-{name}", str(costs.get(name, 0.0)))]
        given = planned(capsys, url, *GIVEN, "--batch-size", "100", *flags, *arguments)["given"]
        return given["later"]["accelerator_utilization"], given["first"]["seconds"]

    utilization, first_seconds = predicted({})
    assert utilization == pytest.approx(1.0, abs=0.01)
    for name, cost in COSTS.items():
        slower, longer_seconds = predicted({name: cost})
        assert longer_seconds > 1.5 * first_seconds, name
        assert (slower < 0.7) == (name != "new-gb"), name
    two = ("--ranks-per-node", "2")
    alone, shared = (predicted({"batch": 5e4}, *two, "--cores", cores)[0] for cores in ("2", "1"))
    assert shared == pytest.approx(alone / 2, rel=0.1)


def test_an_unknown_column_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(str(tmp_path / "d"), 8192)
    assert main(["plan", str(tmp_path / "d"), *GIVEN, "--columns", "data,other"]) == 2
    assert "other" in capsys.readouterr().err


def test_what_is_shown_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(str(tmp_path / "d"), 8192)
    assert main(["plan", str(tmp_path / "d"), *GIVEN, "--window", "1", "--price-of-hour", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if str(tmp_path) not in line]
    assert all(len(line) <= 80 for line in shown)
    assert any(line.startswith("  predicted") and "as it is" in line and "advised" in line for line in shown)
    assert any("no epoch can be shorter than" in line for line in shown)
    assert any("warm tier: off" in line for line in shown)


def test_what_cannot_run_is_shown_with_what_could(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(str(tmp_path / "d"), 1 << 20)
    assert main(["plan", str(tmp_path / "d"), *GIVEN, "--loader-memory", "2MB"]) == 0
    shown = capsys.readouterr().out
    assert "cannot run" in shown
    assert "give memory=" in " ".join(shown.split())


@pytest.mark.parametrize(
    "wrong", [[], ["--gpu-rate", "0"], ["--gpu-rate", "nan"], ["--gpu-rate", "1", "--nodes", "0"], ["--gpu-rate", "x"]]
)
def test_wrong_usage_is_2(tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["plan", str(tmp_path), *wrong])
    assert raised.value.code == 2


def test_a_missing_data_set_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--gpu-rate", "1"]) == 1
    assert "stoker pack" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--gpu-rate", "1e-300", "'1e-300' is not from 0.001 to 1,000,000,000,000"),
        ("--gpu-rate", "1e300", "'1e300' is not from"),
        ("--first-byte", "1e308", "'1e308' is not from 0.001 to 10,000"),
        ("--first-byte", "0", "'0' is not from"),
        ("--bandwidth", "0", "'0' is not from 1,000 B/s to"),
        ("--bandwidth", "10Gb", "'10Gb' is not a rate"),
        ("--price-of-hour", "1e308", "'1e308' is not from 0 to 1,000,000,000"),
        ("--price-of-hour", "inf", "'inf' is not from"),
        ("--probe", "1KB", "'1KB' is not from 64.0 KiB to"),
        ("--disk", "9999999PB", "'9999999PB' is not from 0 B to 1024 PiB"),
        ("--batch-size", "-1", "'-1' is not a positive whole number"),
        ("--ranks-per-node", "0", "'0' is not a positive whole number"),
    ],
)  # fmt: skip
def test_a_figure_that_cannot_be_planned_with_is_named_with_its_range(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, said: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["plan", "memory://none", "--gpu-rate", "1", f"{flag}={value}"])
    assert raised.value.code == 2
    assert f"argument {flag}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--shuffle", "full"), "shuffle 'full' is not planned"),
        (("--batch-size", "999999999999"), "a batch of 999,999,999,999 takes 200,000,000,000 s"),
        (("--nodes", "100000"), "--nodes 100000 with --ranks-per-node 1 are 100,000 ranks, more than the 65,536"),
        (("--nodes", "9000", "--ranks-per-node", "8"), "72,000 ranks"),
        (("--bandwidth", "8kbit", "--first-byte", "9000"), "through such a bucket a loader cannot have its data"),
    ],
)
def test_what_cannot_be_planned_is_wrong_usage_and_nothing_is_measured_for_it(
    bucket: LocalBucket, capsys: pytest.CaptureFixture[str], wrong: tuple[str, ...], said: str
) -> None:
    pack("s3://stoker/data", 64 << 10)
    before = bucket.counts.requests["GetObject"]
    assert main(["plan", "s3://stoker/data", "--gpu-rate", "5", "--memory", "1GB", *wrong]) == 2
    assert said in capsys.readouterr().err
    assert bucket.counts.requests["GetObject"] <= before + 1


@pytest.mark.parametrize("memory", ["0", "1", "4KB"])
def test_too_little_memory_is_an_error_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    pack(str(tmp_path / "d"), 64 << 10)
    assert main(["plan", str(tmp_path / "d"), *GIVEN[:-1], memory]) == 1
    assert "no loader of this data set fits into the" in capsys.readouterr().err


def test_ranks_of_a_node_share_its_memory_and_its_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(str(tmp_path / "d"), 64 << 10)
    slow = (
        str(tmp_path / "d"),
        "--gpu-rate",
        "100000",
        "--first-byte",
        "5",
        "--bandwidth",
        "80Mbit",
        "--memory",
        "64MB",
    )
    one = planned(capsys, *slow)
    four = planned(capsys, *slow, "--ranks-per-node", "4")
    assert (four["nodes"], four["ranks_per_node"]) == (1, 4)
    assert four["given"]["bound"]["transfer_seconds"] == one["given"]["bound"]["transfer_seconds"]
    assert four["given"]["bound"]["limit"] == "bandwidth"
    assert main(["plan", *slow, "--ranks-per-node", "4"]) == 0
    assert "1 node of 4 ranks, each rank 100,000 samples/s" in capsys.readouterr().out


def test_prices_that_cannot_be_read_are_found_out_before_anything_is(
    bucket: LocalBucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_PRICES", "/dev/zero")
    before = bucket.counts.requests["GetObject"]
    assert main(["plan", "s3://stoker/data", "--gpu-rate", "5"]) == 2
    assert "/dev/zero cannot be read: it is not a regular file" in capsys.readouterr().err
    assert bucket.counts.requests["GetObject"] == before
