"""``--json`` of the commands whose text other tests read: one document on standard output, and the same exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.cli import main
from stoker.trace import ChromeTrace
from support.traced import TracedRun

SAMPLES = 200


@pytest.fixture
def url(tmp_path: Path) -> str:
    schema = {
        "image": stoker.Array("uint8", (25,)),
        "label": stoker.Array("int64"),
        "half": stoker.Array("bfloat16", (2,)),
        "raw": stoker.Bytes(),
        "name": stoker.Text(),
    }
    with stoker.Packer(tmp_path / "data", schema=schema, super_sample_bytes=2000) as packer:
        for number in range(SAMPLES):
            image = np.arange(25, dtype="u1") + number % 200
            sample = {"image": image, "label": number, "half": np.array([1, 2], "u2"), "raw": bytes(20)}
            packer.write({**sample, "name": f"sample {number}"})
    return str(tmp_path / "data")


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_head_shows_values_and_statistics_of_large_ones(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "head", url, "-n", "2")
    assert (found["url"], found["version"], len(found["samples"])) == (url, 1, 2)
    assert found["samples"][1] == {
        "image": {"dtype": "uint8", "shape": [25], "min": 1, "max": 25, "mean": 13.0},
        "label": 1,
        "half": [1, 2],
        "raw": {"size_bytes": 20, "first_bytes": "00" * 16},
        "name": "sample 1",
    }


def test_rebuild_manifest_lists_what_is_lost(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = document(capsys, "rebuild-manifest", url)
    assert (whole["is_new"], whole["samples"], whole["lost"]) == (False, SAMPLES, [])
    lost = min(Path(url).glob("data/*/*"))
    lost.unlink()
    found = document(capsys, "rebuild-manifest", url, code=1)
    assert (found["version"], found["is_new"], found["super_samples"]) == (2, True, whole["super_samples"] - 1)
    assert [each["key"] for each in found["lost"]] == [str(lost.relative_to(url))]


def test_rm_counts_what_it_deleted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(url) / "data" / "mine"
    other.write_text("mine")
    objects = [path for path in Path(url).rglob("*") if path.is_file() and path != other]
    found = document(capsys, "rm", url, "--yes")
    assert (found["deleted"], found["others"]) == (len(objects), ["data/mine"])
    assert found["requests"]["DELETE"] == len(objects)
    assert capsys.readouterr().err == ""


def test_cache_warm_counts_what_it_read(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = f"disk:{tmp_path / 'cache'}?limit=10MB"
    first = document(capsys, "cache", "warm", url, "--cache", cache)
    assert first["read"] == first["held"] == first["fit"] == first["super_samples"] > 1
    assert document(capsys, "cache", "warm", url, "--cache", cache) == {**first, "read": 0}


def test_trace_view_lists_waits_with_their_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    with ChromeTrace(path, clock=lambda: 0.0) as sink:
        run = TracedRun(objects=40, slots=6, compute_seconds=0.001, sinks=[sink])
        run.store.late = {20: 5.0}
        run.run()
    found = document(capsys, "trace", "view", str(path), "--worst", "3")
    assert (found["batches"], len(found["worst"]), found["is_truncated"]) == (40, 3, False)
    assert sum(phase["seconds"] for phase in found["phases"].values()) == pytest.approx(found["waited_seconds"])
    worst = found["worst"][0]
    assert worst["seconds"] == pytest.approx(sum(cause["seconds"] for cause in worst["causes"]))


def test_shuffle_shows_plans_and_epochs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("shuffle", url, "--seed", "7", "--epochs", "0..1")
    plans = document(capsys, *arguments, "--plan")
    assert {plan["way"] for plan in plans} == {"ranged", "streamed", "scattered"}
    found = document(capsys, *arguments)
    assert [(each["epoch"], each["is_new"]) for each in found["epochs"]] == [(0, True), (1, True)]
    assert (found["fan_out"]["samples"], found["fan_out"]["in_vain"]) == (2 * SAMPLES, 0)
    assert found["requests"]["PUT"] > 2
    again = document(capsys, *arguments)
    assert [(each["epoch"], each["is_new"]) for each in again["epochs"]] == [(0, False), (1, False)]
