"""``stoker shuffle``: epochs that the command writes, is killed at, and resumes, read by a loader."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import stoker
from stoker import Order, OrderConfig
from stoker.abc import Answer
from stoker.cli import main
from stoker_torch import Loader
from support.fanout import ScriptedExecutor

SAMPLES = 3000


def pack(url: Path, numbers: range, mode: Literal["create", "append"] = "create") -> None:
    schema = {"x": stoker.Array("int64"), "image": stoker.Array("uint8", (32, 32))}
    with stoker.Packer(url, schema=schema, super_sample_bytes=64 << 10, mode=mode) as packer:
        packer.extend({"x": number, "image": np.full((32, 32), number % 251, np.uint8)} for number in numbers)


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """A data set in a folder."""
    found = tmp_path / "ds"
    pack(found, range(SAMPLES))
    return found


def command(url: Path, *more: str, seed: int = 7) -> list[str]:
    return ["shuffle", str(url), "--seed", str(seed), *more]


def epochs_there(url: Path) -> list[int]:
    return sorted(int(found.parts[-3]) for found in url.glob("epochs/*/*/manifests/00000001.safetensors"))


def read(url: Path, epoch: int = 0, **settings: Any) -> list[int]:
    """Return an epoch's sequence; it must have objects of its own."""
    with Loader(url, batch_size=64, shuffle="materialized", seed=7, **settings) as loader:
        loader.set_epoch(epoch)
        found = [number for batch in loader for number in batch["x"].tolist()]
        assert loader._resources.pipeline.is_materialized
        return found


def full(epoch: int) -> list[int]:
    order = Order(np.array([SAMPLES]), OrderConfig(shuffle="full", seed=7), epoch)
    return [int(number) for number in order.at(0, SAMPLES)]


def test_epochs_are_made_ahead_and_those_behind_are_kept_unless_a_number_is_given(
    url: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(url, "--epochs", "0..2")) == 0
    assert epochs_there(url) == [0, 1, 2]
    assert [read(url, epoch) for epoch in range(3)] == [full(epoch) for epoch in range(3)]
    assert main(command(url, "--epoch", "3")) == 0
    assert epochs_there(url) == [0, 1, 2, 3]
    said = capsys.readouterr().err
    assert "deleted" not in said
    assert main(command(url, "--epoch", "3", "--keep", "1")) == 0
    assert epochs_there(url) == [2, 3]
    assert "deleted epochs 0, 1 (--keep 1)" in capsys.readouterr().err
    assert main(command(url, "--epoch", "3", "--keep", "0", "--quiet")) == 0
    assert epochs_there(url) == [3]
    assert capsys.readouterr().err == ""
    assert "epoch 3 is at " in said
    assert "GETs" in said
    assert "already" not in said
    assert main(command(url, "--epoch", "3", "--keep", "0")) == 0
    assert "(it was there already)" in capsys.readouterr().err


def test_an_epoch_is_of_one_version_and_those_of_others_are_left(url: Path) -> None:
    assert main(command(url, "--epochs", "0..1", "--quiet")) == 0
    pack(url, range(SAMPLES, SAMPLES + 9), mode="append")
    with Loader(url, batch_size=64, shuffle="materialized", seed=7) as loader:
        next(iter(loader))
        assert not loader._resources.pipeline.is_materialized
    assert read(url, version=1) == full(0)
    assert main(command(url, "--epoch", "1", "--keep", "0", "--quiet")) == 0
    assert epochs_there(url) == [0, 1, 1]
    assert main(["gc", str(url), "--keep-versions", "1", "--delete"]) == 0
    assert epochs_there(url) == [0, 1, 1]


def test_epochs_of_an_older_version_can_be_made(url: Path) -> None:
    pack(url, range(SAMPLES, SAMPLES + 9), mode="append")
    assert main(command(url, "--at", "1", "--epoch", "0", "--quiet")) == 0
    assert read(url, version=1) == full(0)


@pytest.mark.parametrize("way", ["ranged", "streamed", "scattered"])
def test_every_way_can_be_chosen(url: Path, way: str) -> None:
    assert main(command(url, "--epoch", "1", "--way", way, "--slices", "3", "--lanes", "3", "--quiet")) == 0
    assert sorted(read(url, 1, lanes=3)) == list(range(SAMPLES))


def test_a_plan_shows_what_every_way_takes_and_makes_nothing(url: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(url, "--epoch", "0", "--plan", "--lanes", "4")) == 0
    shown = capsys.readouterr().out
    assert all(way in shown for way in ("ranged", "streamed", "scattered", "chosen", "3,000 samples"))
    assert epochs_there(url) == []


def test_a_plan_counts_the_processors_that_functions_have(
    url: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deployed(ScriptedExecutor):
        platform = "cloud-run"
        sees_files = True
        processors = 1.0

        def vcpus(self, function: str) -> float:
            return {"shuffle": self.processors}[function]

    async def unused(*_: int) -> Answer:
        raise AssertionError

    monkeypatch.setattr("stoker.fanout.open_executor", lambda *_: Deployed(unused))
    dollars = []
    for Deployed.processors in (1.0, 2.0):
        assert main(command(url, "--epoch", "0", "--plan", "--on", "deployed")) == 0
        dollars.append(re.findall(r"streamed.*\$(\S+) +\$(\S+)", capsys.readouterr().out))
    ((store, one),), ((same_store, two),) = dollars
    assert store == same_store
    assert float(one) < float(two)


@pytest.mark.parametrize(
    "more",
    [
        ("--epoch", "x"),
        ("--epoch", "3..1"),
        ("--epoch", "1", "--keep", "-1"),
        ("--epoch", "1", "--keep", "100000000"),
        ("--epoch", "100000000"),
        (),
    ],
)
def test_arguments_that_make_no_sense_are_refused(url: Path, more: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command(url, *more))
    assert ended.value.code == 2


def test_functions_that_there_are_not_are_refused(url: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(url, "--epoch", "1", "--on", "the moon")) == 2
    assert "the moon" in capsys.readouterr().err
    assert main(command(url, "--epoch", "1", "--workers", "3")) == 2
    assert "--workers needs --on" in capsys.readouterr().err
    assert main(command(url, "--epoch", "1", "--on", "lambda", "--function-region", "us-east-1")) == 2
    assert "cannot reach" in capsys.readouterr().err


def test_memory_that_is_too_small_is_an_error_in_one_line(url: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(url, "--epoch", "0", "--memory", "160MiB")) == 1
    assert "or more in total" in capsys.readouterr().err


def test_the_most_epochs_can_be_kept(url: Path) -> None:
    assert main(command(url, "--epochs", "0..1", "--keep", "99999999", "--quiet")) == 0
    assert epochs_there(url) == [0, 1]


def test_a_command_that_is_killed_is_gone_on_with(url: Path) -> None:
    program = [sys.executable, "-m", "stoker.cli", *command(url, "--epoch", "0", "--slices", "8", "--quiet")]
    running = subprocess.Popen(program)
    for _ in range(3000):
        if len(list(url.glob("epochs/*/*/data/*/[0-9]*"))) > 10 or running.poll() is not None:
            break
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    written = {path: path.stat().st_mtime_ns for path in url.glob("epochs/*/*/data/*/[0-9]*")}
    assert written
    assert main(command(url, "--epoch", "0", "--slices", "8", "--quiet")) == 0
    assert read(url) == full(0)
    assert all(path.stat().st_mtime_ns == changed for path, changed in written.items())


def test_worker_processes_make_an_epoch(url: Path) -> None:
    url = url.rename(url.with_name("a data set"))
    more = ("--epoch", "0", "--on", "local", "--slices", "4", "--way", "scattered", "--quiet")
    assert main(command(url, *more)) == 0
    assert read(url) == full(0)
