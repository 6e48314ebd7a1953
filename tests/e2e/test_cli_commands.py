from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker_local import (
    BucketConfig,
    BucketProcess,
    BucketSpec,
    LocalBucket,
    NetworkShape,
    bucket_process,
    running_bucket,
)
from support.commands import forked_commands, run_command
from support.local_bucket import s3_client
from support.places import tar_of

Environment = dict[str, str]


def start(*arguments: object, environment: Environment | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def stoker(
    *arguments: object, code: int = 0, environment: Environment | None = None, is_anew: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in an interpreter of its own if it must begin anew, and check its exit code."""
    done = run_command(*arguments, environment={**os.environ, **(environment or {})}, is_anew=is_anew)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forked_commands():
        yield


def images(folder: Path, count: int = 40) -> Path:
    rng = np.random.default_rng(5)
    for number in range(count):
        path = folder / ("cats + dogs" if number % 2 else "ünder") / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(2000 + number))
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    stoker("pack", images(folder / "in"), folder / "out", "--super-sample-bytes", "16KiB", "--quiet")
    return folder / "out"


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    for path in packed.rglob("*"):
        if path.is_file():
            target = tmp_path / "copy" / path.relative_to(packed)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "copy"


def test_pack_tells_what_it_does_on_stderr_and_leaves_stdout_alone(tmp_path: Path) -> None:
    source = images(tmp_path / "in")
    (source / "README.md").write_text("hello")
    done = stoker("pack", source, tmp_path / "out", "--super-sample-bytes", "16_384", is_anew=True)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[:2] == [f"opening {source}", f"packing {source} as image-folder"]
    assert lines[2].startswith("1 of 41 files were left out")
    assert lines[-1].startswith("packed 40 samples into 6 super-samples, ")
    again = stoker("pack", source, tmp_path / "out", "--quiet", code=1)
    assert again.stderr.startswith(f"stoker: error: there is a data set at {tmp_path / 'out'} already")
    more = stoker("pack", source, tmp_path / "out", "--append")
    assert ", version 2" in more.stderr
    assert json.loads(stoker("info", tmp_path / "out", "--json", is_anew=True).stdout)["samples"] == 80
    assert "version        2 (there are 1, 2)" in stoker("info", tmp_path / "out").stdout


def test_info_shows_what_the_data_set_is(packed: Path) -> None:
    found = json.loads(stoker("info", packed, "--json").stdout)
    assert (found["samples"], found["super_samples"], found["version"], found["versions"]) == (40, 6, 1, [1])
    assert found["runs"][0]["samples"] == 40
    assert [column["name"] for column in found["schema"]] == ["image", "label", "path"]
    text = stoker("info", packed).stdout
    assert "label  int64, 2 classes: cats + dogs, ünder" in text
    assert "no version 9; its newest is 1" in stoker("info", packed, "--at", 9, code=1).stderr


def test_head_previews_samples_across_super_samples(packed: Path) -> None:
    lines = stoker("head", packed, "-n", 12, is_anew=True).stdout.splitlines()
    assert len(lines) == 12 * 4
    assert lines[0] == "sample 0"
    assert lines[1].startswith("  image  2,001 bytes: ")
    assert lines[2:4] == ["  label  0 (cats + dogs)", '  path   "cats + dogs/0001.jpg"']
    assert len(stoker("head", packed, "-n", 1000).stdout.splitlines()) == 40 * 4


def contents(kind: str) -> dict[str, bytes]:
    array, arrays = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros((9, 4), "float32"))
    np.savez_compressed(arrays, x=np.zeros((9, 4), "float32"), y=np.arange(9))
    return {
        "files": {"in/a b.bin": b"1", "in/ü/c": b""},
        "npy": {"x.npy": array.getvalue()},
        "npz": {"x.npz": arrays.getvalue()},
        "webdataset": {f"t-{n}.tar": tar_of([(f"{n}.txt", b"x"), (f"{n}.cls", b"1")]) for n in range(3)},
    }[kind]


@pytest.mark.parametrize(
    ("kind", "source", "samples"),
    [("files", "in", 2), ("npy", "x.npy", 9), ("npz", "x.npz", 9), ("webdataset", "t-{0..2}.tar", 3)],
)
def test_every_kind_of_source_is_packed(tmp_path: Path, kind: str, source: str, samples: int) -> None:
    for name, data in contents(kind).items():
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / name).write_bytes(data)
    done = stoker("pack", tmp_path / "raw" / source, tmp_path / "out", is_anew=True)
    assert f"as {kind}" in done.stderr
    assert json.loads(stoker("info", tmp_path / "out", "--json").stdout)["samples"] == samples


def test_verify_lists_the_bad_super_samples_and_exits_1(copied: Path) -> None:
    assert "all of them good" in stoker("verify", copied, "--deep", is_anew=True).stderr
    bad = sorted(copied.glob("data/*/*"))[2:4]
    with bad[0].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    bad[1].unlink()
    done = stoker("verify", copied, "--quiet", code=1)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [str(path.relative_to(copied)) for path in bad]
    assert done.stderr == ""
    assert "2 of them bad" in stoker("verify", copied, code=1).stderr
    assert str(bad[0].relative_to(copied)) in stoker("head", copied, "-n", 40, code=1).stderr


def test_rebuild_manifest_brings_back_a_lost_manifest(copied: Path) -> None:
    before = json.loads(stoker("info", copied, "--json").stdout)
    (copied / "manifest.safetensors").unlink()
    for path in (copied / "manifests").iterdir():
        path.unlink()
    assert "there is no data set at" in stoker("info", copied, code=1).stderr
    assert "6 super-samples, 40 samples" in stoker("rebuild-manifest", copied, is_anew=True).stdout
    after = json.loads(stoker("info", copied, "--json").stdout)
    assert (after["schema"], after["runs"]) == (before["schema"], before["runs"])
    assert "nothing is missing from version" in stoker("rebuild-manifest", copied).stdout


def test_rebuild_manifest_lists_what_is_lost_and_exits_1(copied: Path) -> None:
    min(copied.glob("data/*/*")).unlink()
    lines = stoker("rebuild-manifest", copied, code=1).stdout.splitlines()
    assert lines[0].startswith("made version 2: 5 super-samples")
    assert lines[1] == "lost: 1"


def test_gc_lists_and_deletes_what_nothing_covers(copied: Path) -> None:
    assert stoker("gc", copied, is_anew=True).stdout == "no garbage\n"
    orphan = copied / "data" / "0123456789abcdef" / "00000000"
    orphan.parent.mkdir()
    orphan.write_bytes(b"x" * 2048)
    lines = stoker("gc", copied).stdout.splitlines()
    assert lines == [
        "data/0123456789abcdef/00000000  2.00 KiB",
        "1 object could be deleted with --delete, 2.00 KiB of super-samples",
    ]
    assert orphan.exists()
    assert "1 object deleted" in stoker("gc", copied, "--delete").stdout
    assert not orphan.exists()
    stoker("verify", copied)


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(5000))
    stoker("pack", tmp_path / "x.npy", tmp_path / "out", "--quiet")
    with start("head", tmp_path / "out", "-n", 5000) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "sample 0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(300) == 141


def test_a_sample_larger_than_any_may_be_is_named_and_a_pack_without_it_succeeds(tmp_path: Path) -> None:
    source = images(tmp_path / "in", 20)
    large = source / "ünder" / "large.jpg"
    large.touch()
    os.truncate(large, (1 << 30) + 1)
    failed = stoker("pack", source, tmp_path / "out", "--super-sample-bytes", "16KiB", code=1)
    assert "large.jpg has 1073741825 bytes; a sample may have at most" in failed.stderr.splitlines()[-1]
    assert "there is no data set" in stoker("info", tmp_path / "out", code=1).stderr
    os.truncate(large, 100_000)
    stoker("pack", source, tmp_path / "out", "--super-sample-bytes", "16KiB")
    assert json.loads(stoker("info", tmp_path / "out", "--json").stdout)["samples"] == 21


def test_hostile_names_never_reach_the_terminal(tmp_path: Path) -> None:
    name = "\x1b[31mred\x9b\u202e"
    (tmp_path / "in" / name).mkdir(parents=True)
    (tmp_path / "in" / name / "1.jpg").write_bytes(b"x")
    (tmp_path / "in" / f"{name}.md").write_bytes(b"x")
    shown = stoker("pack", tmp_path / "in", tmp_path / "out").stderr
    shown += stoker("head", tmp_path / "out").stdout + stoker("info", tmp_path / "out").stdout
    shown += stoker("pack", tmp_path / "in" / f"{name}.md", tmp_path / "x", code=2).stderr
    assert "\\x1b[31mred\\x9b\\u202e" in shown
    assert not {"\x1b", "\x9b", "\u202e"} & set(shown)


def test_a_terminal_without_unicode_gets_escapes(packed: Path) -> None:
    found = stoker("info", packed, environment={"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}, is_anew=True)
    assert "cats + dogs, \\xfcnder" in found.stdout


@pytest.fixture
def bucket() -> Iterator[BucketProcess]:
    """A bucket in another process whose first byte takes a while."""
    buckets = (BucketSpec(name="private"), BucketSpec(name="public", anonymous=True))
    config = BucketConfig(buckets=buckets, shape=NetworkShape(first_byte_seconds=0.02))
    with bucket_process(config) as process:
        yield process


def test_source_and_data_set_may_be_in_buckets(tmp_path: Path, bucket: BucketProcess) -> None:
    environment = bucket.environment()
    source = images(tmp_path / "in", 12)
    stoker("pack", source, "s3://private/one", environment=environment, is_anew=True)
    found = stoker("info", "s3://private/one", "--json", environment=environment)
    assert json.loads(found.stdout)["samples"] == 12
    stoker("verify", "s3://private/one", "--deep", environment=environment, is_anew=True)
    stoker("verify", "s3://private/one", "--anonymous", environment=environment, code=1)
    flags = ["--endpoint-url", bucket.url, "--region", "us-east-1"]
    keys = {name: value for name, value in environment.items() if "KEY" in name}
    stoker("verify", "s3://private/one", *flags, environment=keys)


def test_a_source_may_be_public_and_the_data_set_private(tmp_path: Path, bucket: BucketProcess) -> None:
    with s3_client(bucket) as client:
        for number in range(20):
            client.put_object(Bucket="public", Key=f"raw/a + b/{number}.jpg", Body=bytes([number]) * 100)
    stoker("pack", "s3://public/raw", "s3://private/out", "--source-anonymous", environment=bucket.environment())
    found = stoker("head", "s3://private/out", "-n", 20, environment=bucket.environment()).stdout
    assert found.count('"a + b/') == 20
    refused = stoker("pack", "s3://private/raw", tmp_path, "--anonymous", environment=bucket.environment(), code=1)
    assert "stoker: error: s3://private/raw" in refused.stderr


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalBucket, threading.Event, threading.Event]]:
    """A bucket that sets the first event once it has 16 objects, and then blocks until the second is set."""
    with running_bucket(BucketConfig(buckets=(BucketSpec(name="private"),))) as bucket:
        seen, go_on, perform, left = threading.Event(), threading.Event(), bucket.service.perform, count(16, -1)

        def hold(call: Any) -> Any:
            if call.operation == "PutObject" and not next(left):
                seen.set()
                assert go_on.wait(60)
            return perform(call)

        monkeypatch.setattr(bucket.service, "perform", hold)
        yield bucket, seen, go_on


def test_an_interrupted_pack_says_130_and_the_same_command_finishes_it(
    tmp_path: Path, held: tuple[LocalBucket, threading.Event, threading.Event]
) -> None:
    bucket, seen, go_on = held
    environment = bucket.environment()
    source = images(tmp_path / "in", 200)
    stoker("pack", source, tmp_path / "undisturbed", "--super-sample-bytes", "16KiB", "--quiet")
    command = ["pack", source, "s3://private/out", "--super-sample-bytes", "16KiB", "--concurrency", "1"]
    with start(*command, environment=environment) as process:
        assert process.stderr is not None
        assert seen.wait(60)
        process.send_signal(signal.SIGINT)
        go_on.set()
        assert "running the same command again" in process.stderr.read()
        assert process.wait(300) == 130
    finished = stoker(*command, environment=environment)
    assert "there already: " in finished.stderr
    first = json.loads(stoker("info", tmp_path / "undisturbed", "--json").stdout)
    second = json.loads(stoker("info", "s3://private/out", "--json", environment=environment).stdout)
    for name in ("samples", "super_samples", "size_bytes"):
        assert first[name] == second[name]
    stoker("verify", "s3://private/out", "--deep", environment=environment)
