"""``stoker pack --on``: the program, its worker processes, and what becomes of both when they are killed."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import stoker
from stoker.abc import Answer
from stoker.cli import main
from stoker_local import BucketConfig, BucketSpec, running_bucket
from support.commands import forked_commands, run_command
from support.fanout import ScriptedExecutor, answer
from support.places import tar_of

SMALL = ("--super-sample-bytes", "16KiB", "--part-bytes", "64KiB")
_TIMEOUT_SECONDS = 300  # of a hang


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stoker.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments: object, code: int = 0, is_anew: bool = False) -> str:
    """Run a command to its end, in an interpreter of its own if it must begin anew; check its exit code.

    Returns:
        Its output.
    """
    done = run_command(*arguments, is_anew=is_anew)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forked_commands():
        yield


def files(folder: Path, count: int = 300, size_bytes: int = 2000) -> Path:
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:04} ü.bin").write_bytes(rng.bytes(size_bytes + number))
    return folder


def images(folder: Path) -> Path:
    rng = np.random.default_rng(4)
    for number in range(200):
        path = folder / ("cats + dogs" if number % 3 else "birds") / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(1000))
    return folder


def array(folder: Path) -> Path:
    folder.mkdir(parents=True)
    buffer = io.BytesIO()
    np.save(buffer, np.arange(100_000, dtype="int64").reshape(1000, 100) % 251)
    (folder / "x.npy").write_bytes(buffer.getvalue())
    return folder / "x.npy"


def tars(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for shard in range(5):
        members = [(f"{n:04}.bin", os.urandom(500)) for n in range(shard * 50, shard * 50 + 50)]
        (folder / f"shard-{shard}.tar").write_bytes(tar_of(members))
    return folder


def samples(url: Path) -> list[dict[str, bytes]]:
    """Every sample of a data set, in its order, with its values as bytes."""
    return [
        {name: np.asarray(value).tobytes() for name, value in sample.items()} for sample in stoker.Dataset(str(url))
    ]


def workers(program: subprocess.Popen[str]) -> list[psutil.Process]:
    """The worker processes of a running command."""
    try:
        return psutil.Process(program.pid).children()
    except psutil.NoSuchProcess:
        return []


def packed(url: Path) -> int:
    return len(list((url / "data").glob("*/[0-9]*")))


def wait_for_more(url: Path, than: int, program: subprocess.Popen[str]) -> None:
    """Wait until more is packed, or the command has ended."""
    while packed(url) <= than and program.poll() is None:
        time.sleep(0.005)


@pytest.mark.parametrize("make", [files, images, array, tars])
def test_functions_pack_the_same_samples_in_the_same_order_as_one_process(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    source, url = make(tmp_path / "a folder" / "in"), tmp_path / "a folder" / "out"
    run("pack", source, tmp_path / "plain", *SMALL[:2], "--quiet")
    said = run("pack", source, url, "--on", "local", *SMALL, is_anew=True)
    assert samples(url) == samples(tmp_path / "plain")
    assert " on local: " in said
    assert f"{url}: version 1 has " in said
    assert "GB-s" in said


def test_a_command_that_is_killed_leaves_nothing_running_and_is_resumed_by_itself(tmp_path: Path) -> None:
    source, url = files(tmp_path / "in", 800), tmp_path / "out"
    command = ("pack", source, url, "--on", "local", *SMALL, "--quiet")
    for how in (signal.SIGKILL, signal.SIGINT):
        before = packed(url)
        with start(*command) as program:
            wait_for_more(url, before, program)
            running = workers(program)
            program.send_signal(how)
            _, err = program.communicate(timeout=_TIMEOUT_SECONDS)
        assert program.returncode in (-signal.SIGKILL, 130), err
        _, alive = psutil.wait_procs(running, _TIMEOUT_SECONDS)
        assert not alive
        assert not (url / "manifest.safetensors").exists()
    run(*command)
    assert [sample["path"] for sample in samples(url)] == [
        np.asarray(path.name).tobytes() for path in sorted(source.iterdir())
    ]
    run("verify", "--deep", url)
    assert run("gc", url).startswith("no garbage\n")


def test_workers_that_are_killed_are_replaced_within_the_same_run(tmp_path: Path) -> None:
    source, url = files(tmp_path / "in", 1500), tmp_path / "out"
    rng, kills = random.Random(5), 0
    with start("pack", source, url, "--on", "local", *SMALL) as program:
        wait_for_more(url, 0, program)
        while kills < 4 and program.poll() is None:
            if running := workers(program):
                rng.choice(running).kill()
                kills += 1
            time.sleep(0.2)
        _, err = program.communicate(timeout=_TIMEOUT_SECONDS)
    assert program.returncode == 0, err
    assert kills
    assert "retried" in err
    assert len(samples(url)) == 1500
    run("verify", "--deep", url)


def test_a_part_that_cannot_be_packed_is_named_the_rest_is_packed_and_nothing_is_committed(tmp_path: Path) -> None:
    source, url = tars(tmp_path / "in"), tmp_path / "out"
    damaged = source / "shard-3.tar"
    data = bytearray(damaged.read_bytes())
    data[20_480:22_528] = b"\xff" * 2048
    damaged.write_bytes(data)
    said = run("pack", source, url, "--on", "local", "--super-sample-bytes", "8KiB", "--part-bytes", "64KiB", code=1)
    assert "tasks failed; the others are done and stay so" in said
    assert "shard-3.tar" in said
    assert "PackError" in said
    assert not (url / "manifest.safetensors").exists()
    assert packed(url)


def test_repeated_appends_add_the_source_once(tmp_path: Path) -> None:
    first, more, url = files(tmp_path / "one", 50), files(tmp_path / "two", 70), tmp_path / "out"
    run("pack", first, url, "--quiet")
    for _ in range(2):
        run("pack", more, url, "--append", "--on", "local", *SMALL, "--quiet")
        assert len(samples(url)) == 120
    said = run("pack", first, url, "--on", "local", *SMALL, code=1)
    assert "there is a data set" in said


def test_options_that_reach_a_bucket_are_passed_on_to_the_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stoker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stoker-secret")
    source = files(tmp_path / "in", 100)
    with running_bucket(BucketConfig(buckets=(BucketSpec(name="made"),))) as bucket:
        there = ("--endpoint-url", bucket.url, "--region", "us-east-1")
        run("pack", source, "s3://made/train", "--on", "local", *SMALL, "--quiet", *there, is_anew=True)
        assert '"samples": 100' in run("info", "s3://made/train", "--json", *there)
        run("verify", "--deep", "s3://made/train", *there)
        refused = run("pack", source, "s3://made/other", "--on", "local", *there, "--requester-pays", code=2)
        assert "--requester-pays cannot be passed on to functions" in refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "slurm"), "there is no executor 'slurm'; installed: gcf, lambda, local, ray"),
        (("--on", "lambda", "--function-region", "eu-west-1"), "cannot reach"),
        (("--workers", "3"), "--workers needs --on"),
        (("--part-bytes", "1MiB"), "--part-bytes needs --on"),
        (("--function-region", "eu-west-1"), "--function-region needs --on"),
        (("--on", "local", "--concurrency", "3"), "--concurrency"),
        (("--on", "local", "--function-prefix", "mine"), "--function-prefix has no effect with --on local"),
        (("--on", "local", "--function-url", "http://localhost:1"), "--function-url has no effect with --on local"),
        (("--on", "lambda", "--function-account", "a@b"), "--function-account has no effect with --on lambda"),
        (("--on", "lambda", "--function-project", "p"), "--function-project has no effect with --on lambda"),
        (("--on", "local", "--part-bytes", "1KiB"), "would not fill a super-sample"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_go_together_is_refused_before_the_source_is_opened(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = files(tmp_path / "in", 3)
    assert main(["pack", str(source), str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "opening" not in said
    assert not (tmp_path / "out").exists()


def test_a_commit_that_tells_nothing_is_a_typed_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign(ScriptedExecutor):
        sees_files = True

        async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
            return answer({"state": "complete"})

    async def unused(*_: int) -> Answer:
        raise AssertionError

    monkeypatch.setattr("stoker.fanout.open_executor", lambda *_: Foreign(unused))
    assert main(["pack", str(files(tmp_path / "in", 3)), str(tmp_path / "out"), "--on", "foreign"]) == 1
    assert (
        "stoker: error: the functions on scripted are of another release of stoker: their commit returned no version; "
        "deploy those of this release"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("make", [files, array, tars])
def test_functions_permute_to_the_same_order_as_one_process(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source, url = make(tmp_path / "in"), tmp_path / "out"
    run("pack", source, tmp_path / "plain", *SMALL[:2], "--shuffle", 7, "--quiet")
    said = run("pack", source, url, "--on", "local", "--shuffle", 7, *SMALL, is_anew=True)
    assert samples(url) == samples(tmp_path / "plain")
    assert "permuted with seed 7" in run("info", url)
    assert "no garbage" in run("gc", url)
    assert f"{url}: version 1 has " in said


def test_a_permuting_command_that_is_killed_is_resumed_by_itself_and_nothing_temporary_stays(tmp_path: Path) -> None:
    source, url = files(tmp_path / "in"), tmp_path / "out"
    command = ("pack", source, url, "--on", "local", "--shuffle", 7, *SMALL, "--quiet")
    for pattern in ("packs/*/data/*/*", "packs/*/cells/data/*/*", "data/*/*"):  # staged, scattered, packed
        with start(*command) as program:
            while not list(url.glob(pattern)) and program.poll() is None:
                time.sleep(0.005)
            program.send_signal(signal.SIGKILL)
            program.communicate(timeout=_TIMEOUT_SECONDS)
    run(*command)
    run("pack", source, tmp_path / "whole", *SMALL[:2], "--shuffle", 7, "--quiet")
    assert samples(url) == samples(tmp_path / "whole")
    assert "no garbage" in run("gc", url)
    assert not [path for path in url.glob("packs/*/**/*") if path.is_file()]
