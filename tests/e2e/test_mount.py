"""``stoker mount`` with a real mount, which programs of this machine read; skipped where there can be none."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import stoker
from stoker_local import BucketConfig, BucketProcess, BucketSpec, bucket_process
from support.local_bucket import s3_client
from support.mounts import mounted, read_table, unmount, what_is_missing, with_libfuse

pytestmark = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())

COUNT, URL = 300, "s3://bucket/photos"
TEMPLATE = ("--template", "samples/{label!c}/{name}", "--content", "image")
LOST = (errno.ENOTCONN, errno.ECONNABORTED)
"""Errors of files whose mount has ended."""
PAGE = Path(__file__).parents[2] / "docs" / "files.md"


def image_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(number * 997 % 60_000)


def path_of(number: int) -> str:
    return f"samples/{('cat', 'dog')[number % 2]}/né {number:04}.jpg"


@pytest.fixture(scope="module")
def bucket() -> Iterator[BucketProcess]:
    with (
        bucket_process(BucketConfig(buckets=(BucketSpec(name="bucket"),))) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in process.environment().items():
            patch.setenv(name, value)
        pack(URL)
        yield process


def pack(url: str) -> None:
    classes = ("cat", "dog")
    schema = {"image": stoker.Bytes(), "label": stoker.Array("int64", classes=classes), "name": stoker.Text()}
    with stoker.Packer(url, schema=schema, super_sample_bytes=200_000) as packer:
        packer.extend(
            {"image": image_of(number), "label": number % 2, "name": f"né {number:04}.jpg"} for number in range(COUNT)
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def failure_of(path: Path) -> int | None:
    with pytest.raises(OSError) as failure:  # noqa: PT011 - its number is returned
        path.read_bytes()
    return failure.value.errno


@pytest.mark.usefixtures("bucket")
def test_programs_read_a_mounted_data_set(folder: Path, tmp_path: Path) -> None:
    with mounted(URL, folder, *TEMPLATE) as process:
        assert run("ls", folder).split() == ["objects", "samples"]
        assert len(run("find", folder / "samples", "-type", "f").splitlines()) == COUNT
        run("cp", "-r", folder / "samples", tmp_path / "copy")
        for number in range(COUNT):
            path = path_of(number)
            assert (tmp_path / "copy" / path.removeprefix("samples/")).read_bytes() == image_of(number)
            assert (folder / path).stat().st_size == len(image_of(number))
        sums = run("md5sum", *(folder / path_of(number) for number in range(20)))
        assert [line.split()[0] for line in sums.splitlines()] == [
            hashlib.md5(image_of(number), usedforsecurity=False).hexdigest() for number in range(20)
        ]
        with stoker.open(URL) as dataset:
            for row in (0, len(dataset.manifest) - 1):
                assert (folder / "objects" / dataset.manifest.key(row)).read_bytes() == dataset.read_object(row)
        assert f"{URL} {folder} fuse.stoker ro,nosuid,nodev," in read_table()
        assert "allow_other" not in read_table().partition(str(folder))[2].partition("\n")[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert str(folder) not in read_table()
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("bucket")
def test_nothing_can_be_written(folder: Path) -> None:
    with mounted(URL, folder, *TEMPLATE):
        path = folder / path_of(8)
        writes: list[Any] = [
            lambda: path.write_bytes(b"x"),
            lambda: (folder / "new").touch(),
            lambda: (folder / "samples" / "new").mkdir(),
            path.unlink,
            lambda: path.rename(folder / "other"),
            lambda: path.chmod(0o777),
            lambda: (folder / "link").symlink_to(path),
            lambda: os.truncate(path, 1),
            lambda: os.utime(path),
        ]
        for write in writes:
            with pytest.raises(OSError) as failure:  # noqa: PT011 - its number is checked
                write()
            assert failure.value.errno == errno.EROFS
        assert failure_of(folder / "samples" / "cat" / "none") == errno.ENOENT
        assert path.read_bytes() == image_of(8)


@pytest.mark.usefixtures("bucket")
def test_many_threads_and_processes_read_at_the_same_time(folder: Path) -> None:
    with mounted(URL, folder, *TEMPLATE, "--memory", "40MB"):

        def work(seed: int) -> None:
            for number in np.random.default_rng(seed).permutation(COUNT)[:100].tolist():
                assert (folder / path_of(number)).read_bytes() == image_of(number)

        sums = subprocess.Popen(["sh", "-c", f"cat {shlex.quote(str(folder))}/samples/*/* | md5sum"], stdout=-1)
        with ThreadPoolExecutor(8) as threads:
            for each in [threads.submit(work, seed) for seed in range(8)]:
                each.result(120)
        wanted = hashlib.md5(usedforsecurity=False)
        for number in (*range(0, COUNT, 2), *range(1, COUNT, 2)):
            wanted.update(image_of(number))
        assert sums.communicate(timeout=120)[0].split()[0].decode() == wanted.hexdigest()


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("end", ["SIGTERM", "SIGHUP", "unmount"])
def test_it_ends_cleanly_by_signals_and_when_it_is_unmounted(folder: Path, end: str) -> None:
    with mounted(URL, folder, *TEMPLATE) as process:
        (folder / path_of(3)).read_bytes()
        if end == "unmount":
            unmount(folder)
        else:
            process.send_signal(getattr(signal, end))
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert str(folder) not in read_table()


@pytest.mark.usefixtures("bucket")
def test_a_signal_unmounts_it_while_files_are_open(folder: Path) -> None:
    with mounted(URL, folder, *TEMPLATE) as process:
        file = os.open(next((folder / "objects").rglob("00000000")), os.O_RDONLY)
        assert os.read(file, 4)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert str(folder) not in read_table()
        with pytest.raises(OSError) as failure:  # noqa: PT011 - its number is checked
            os.pread(file, 10, 190_000)
        assert failure.value.errno in LOST
        with suppress(OSError):  # the kernel says so again
            os.close(file)


def test_a_signal_ends_reads_that_wait_for_a_bucket_that_is_gone(folder: Path) -> None:
    with bucket_process(BucketConfig(buckets=(BucketSpec(name="bucket"),))) as alone:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in alone.environment().items():
                patch.setenv(name, value)
            pack(URL)
        with mounted(URL, folder, *TEMPLATE, environment=alone.environment()) as process:
            assert (folder / path_of(0)).read_bytes() == image_of(0)
            run("ls", "-l", folder / "samples" / "cat")
            os.kill(alone.pid, signal.SIGSTOP)
            try:
                failures: list[int | None] = []
                reader = threading.Thread(target=lambda: failures.append(failure_of(folder / path_of(280))))
                reader.start()
                reader.join(0.5)
                assert reader.is_alive()
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 0
                reader.join(30)
                assert len(failures) == 1
                assert failures[0] in (errno.EIO, *LOST)
            finally:
                os.kill(alone.pid, signal.SIGCONT)


@pytest.mark.usefixtures("bucket")
def test_what_a_killed_process_leaves_is_explained_and_can_be_unmounted(folder: Path) -> None:
    with mounted(URL, folder, *TEMPLATE) as process:
        process.kill()
        process.wait(60)
        assert failure_of(folder / path_of(3)) == errno.ENOTCONN
        command = [sys.executable, "-m", "stoker.cli", "mount", URL, str(folder), *TEMPLATE]
        again = subprocess.run(command, env=with_libfuse(), capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 2
        assert re.search(rf"lost its process, unmount it: fusermount3? -u {folder}\n$", again.stderr)
        unmount(folder)
        assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("bucket")
def test_a_folder_is_mounted_once(folder: Path) -> None:
    with mounted(URL, folder, *TEMPLATE):
        command = [sys.executable, "-m", "stoker.cli", "mount", URL, str(folder), *TEMPLATE]
        again = subprocess.run(command, env=with_libfuse(), capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 2
        assert f"something is mounted at {folder} already" in again.stderr
        assert (folder / path_of(3)).read_bytes() == image_of(3)


def test_a_file_whose_object_is_gone_is_an_input_output_error_and_others_are_read(
    bucket: BucketProcess, folder: Path
) -> None:
    pack("s3://bucket/damaged")
    with stoker.open("s3://bucket/damaged") as dataset:
        key, samples = dataset.manifest.key(2), np.cumsum(dataset.manifest.rows.samples)
    with s3_client(bucket) as client:
        client.delete_object(Bucket="bucket", Key=f"damaged/{key}")
    with mounted("s3://bucket/damaged", folder, "--content", "image", "--version", "1") as process:
        assert len(list((folder / "samples").iterdir())) == COUNT
        lost = range(int(samples[1]), int(samples[2]))
        for number in (0, lost[0], lost[-1], lost[-1] + 1):
            if number in lost:
                assert failure_of(folder / f"samples/{number:08d}") == errno.EIO
            else:
                assert (folder / f"samples/{number:08d}").read_bytes() == image_of(number)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    for number in (lost[0], lost[-1]):
        assert f"stoker: cannot read samples/{number:08d}: " in errors
    assert key in errors
    assert "Traceback" not in errors


def test_the_section_of_the_guide_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(16):
        file = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((80, 90, 3), 15 * number, np.uint8)).save(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    text = PAGE.read_text("utf-8")
    blocks = re.findall(r"^```(?:console|shell-session)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^\$ (.*)", "".join(blocks), re.MULTILINE)
    (mount,) = (each for each in commands if each.startswith("stoker mount"))
    before, behind = commands[: commands.index(mount)], commands[commands.index(mount) + 1 :]
    assert behind[-1] == "fusermount3 -u mnt"
    for command in before:
        run(*shlex.split(command))
    _, _, url, folder, *arguments = shlex.split(mount)
    with mounted(url, Path(folder), *arguments) as process:
        for command in behind[:-1]:
            run(*shlex.split(command))
        unmount(Path(folder))
        assert process.wait(60) == 0
