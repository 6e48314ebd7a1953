from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker import S3Options, open_store
from stoker._base.threads import run_in_thread
from stoker._stores.local import is_partial, lock_folder, remove_partial_files
from stoker.abc import ObjectInfo, Store
from stoker.errors import (
    BucketNotFoundError,
    ConfigError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    PreconditionFailedError,
    ServerError,
    StoreError,
)
from support.stores import list_keys, read_range, run_check
from support.waiting import until


def folder_store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "root")


@pytest.mark.parametrize("key", ["../out", "a/../../out", "a/./b", "a//b", "a/", "..", ".stoker-0123.partial"])
def test_a_key_that_is_no_path_below_the_root_is_refused(tmp_path: Path, key: str) -> None:
    async def check(store: Store) -> None:
        for call in (store.put(key, b"x"), store.get(key), store.head(key), store.delete(key)):
            with pytest.raises(ConfigError):
                await call

    run_check(folder_store(tmp_path), check)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_neither_listed_nor_in_the_way(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        await store.put("a/x", b"1")
        (tmp_path / "root/a/.stoker-00ff.partial").write_bytes(b"half")
        assert await list_keys(store) == ["a/x"]
        await store.put("a/x", b"2")
        assert (await store.get("a/x"))[0] == b"2"

    run_check(folder_store(tmp_path), check)


@pytest.mark.parametrize("change", [lambda store: store.put("a/y", b"2"), lambda store: store.delete("a/x")])
def test_the_next_change_in_a_folder_removes_what_a_killed_writer_left_there(
    tmp_path: Path, change: Callable[[Store], Awaitable[object]]
) -> None:
    left, elsewhere, other = (
        tmp_path / "root" / name for name in ("a/.stoker-1.partial", "b/.stoker-2.partial", "a/.x")
    )
    run_check(folder_store(tmp_path), lambda store: _put(store, "a/x"))
    (tmp_path / "root/b").mkdir()
    for path in (left, elsewhere, other):
        path.write_bytes(b"half")

    async def check(store: Store) -> None:
        await list_keys(store)
        assert left.exists()
        await change(store)

    run_check(folder_store(tmp_path), check)
    assert (left.exists(), elsewhere.exists(), other.exists()) == (False, True, True)


def test_an_unfinished_write_is_not_taken_for_a_killed_one(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        with lock_folder(tmp_path / "root"):
            write = asyncio.ensure_future(store.put("x", b"whole"))
            await until(lambda: any(is_partial(path.name) for path in (tmp_path / "root").iterdir()))
            remove_partial_files(tmp_path / "root")
        await write
        assert (await store.get("x"))[0] == b"whole"

    (tmp_path / "root").mkdir()
    run_check(folder_store(tmp_path), check)


def test_a_write_that_is_swept_before_it_has_its_lock_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    swept: list[int] = []

    def flock(handle: int, operation: int) -> None:
        if not swept:
            swept.append(operation)  # before the sweep's own lock comes here
            remove_partial_files(tmp_path / "root")
            assert not list((tmp_path / "root").iterdir())
        real(handle, operation)

    monkeypatch.setattr("fcntl.flock", flock)
    run_check(folder_store(tmp_path), lambda store: _put(store, "x"))
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["x"]
    assert swept


def test_a_process_forked_while_a_folder_is_locked_does_not_keep_the_lock(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from stoker._stores.local import lock_folder
folder = Path(sys.argv[1])
with lock_folder(folder):
    if not (child := os.fork()):
        signal.pause()
try:
    signal.alarm(20)  # of waiting for a lock that never comes
    with lock_folder(folder):
        print("free")
finally:
    os.kill(child, signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("free\n", 0)


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        await store.put("x", b"1")
        with pytest.raises(PreconditionFailedError):
            await store.put("x", b"2", if_absent=True)
        (tmp_path / "root/folder").mkdir()
        with pytest.raises(StoreError, match="folder"):
            await store.put("folder", b"2")

    run_check(folder_store(tmp_path), check)
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["folder", "x"]


def test_a_key_below_an_object_says_why_it_cannot_be_written(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        await store.put("a", b"1")
        with pytest.raises(StoreError, match="below a file"):
            await store.put("a/b", b"1")
        with pytest.raises(NotFoundError):
            await store.get("a/b")

    run_check(folder_store(tmp_path), check)


def test_written_files_have_the_mode_that_the_user_chose(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run_check(folder_store(tmp_path), lambda store: _put(store, "x"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "root/x").stat().st_mode) == 0o640


async def _put(store: Store, key: str) -> None:
    await store.put(key, b"1")


def test_quick_writes_of_one_size_never_share_a_tag(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        tags = [(await store.put("x", b"same size")).tag for _ in range(50)]
        assert len(set(tags)) == 50

    run_check(folder_store(tmp_path), check)


def test_a_file_rewritten_by_others_has_another_tag(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        old = await store.put("x", b"old")
        with (tmp_path / "root/x").open("r+b") as file:
            file.write(b"new")
        os.utime(tmp_path / "root/x")
        with pytest.raises(ObjectChangedError):
            await read_range(store, "x", 0, 3, old.tag)
        with pytest.raises(PreconditionFailedError):
            await store.put("x", b"mine", if_tag=old.tag)

    run_check(folder_store(tmp_path), check)


def test_what_is_no_regular_file_is_neither_listed_nor_read(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        await store.put("a/x", b"1")
        os.mkfifo(tmp_path / "root/pipe")
        for key in ("pipe", "a"):
            with pytest.raises(NotFoundError):
                await store.get(key)
        assert await list_keys(store) == ["a/x"]

    run_check(folder_store(tmp_path), check)


def test_links_are_followed_and_a_circle_of_them_ends(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        await store.put("a/x", b"1")
        (tmp_path / "root/a/loop").symlink_to(tmp_path / "root")
        (tmp_path / "root/b").symlink_to(tmp_path / "root/a")
        (tmp_path / "root/dangling").symlink_to(tmp_path / "nowhere")
        assert await list_keys(store) == ["a/x", "b/x"]
        assert (await store.get("b/x"))[0] == b"1"

    run_check(folder_store(tmp_path), check)


def test_a_name_that_is_not_utf8_is_an_error_that_shows_it(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    try:
        Path(os.fsdecode(os.fsencode(tmp_path / "root") + b"/bad-\xff")).write_bytes(b"1")
    except OSError:
        pytest.skip("this file system takes no such names")

    async def check(store: Store) -> None:
        with pytest.raises(StoreError, match="UTF-8"):
            await list_keys(store)

    run_check(folder_store(tmp_path), check)


def test_a_root_that_is_a_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")

    async def check(store: Store) -> None:
        with pytest.raises(BucketNotFoundError, match="root is a file, not a folder"):
            await store.get("x")

    run_check(folder_store(tmp_path), check)


def test_a_missing_root_is_not_made_by_reading_and_made_by_writing(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        for use in (store.get("x"), store.head("x"), list_keys(store), store.delete("x")):
            with pytest.raises(BucketNotFoundError, match="root"):
                await use
        assert not (tmp_path / "root").exists()
        await store.put("deep/er/x", b"1")
        assert await list_keys(store) == ["deep/er/x"]

    run_check(folder_store(tmp_path), check)


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EACCES, PermissionDeniedError, "owner and mode"),
        (errno.EROFS, PermissionDeniedError, "read-only"),
        (errno.ENOSPC, StoreError, "disk is full"),
        (errno.EMFILE, StoreError, "ulimit"),
        (errno.EIO, ServerError, "input/output"),
        (errno.ELOOP, StoreError, "could not be used"),
    ],
)
def test_what_the_system_refuses_is_a_typed_error_that_names_object_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreError], words: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    async def check(store: Store) -> None:
        await store.put("name", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            for use in (store.get("name"), store.head("name"), store.put("name", b"2")):
                with pytest.raises(kind, match=f"name.*{words}"):
                    await use
        assert (await store.get("name"))[0] == b"1"

    run_check(folder_store(tmp_path), check)


def test_of_several_processes_with_one_tag_exactly_one_wins(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from stoker.errors import PreconditionFailedError
from stoker import open_store
async def main(root, tag, body):
    await open_store(root).put("x", body.encode(), if_tag=tag)
    print("won")
try:
    asyncio.run(main(*sys.argv[1:]))
except PreconditionFailedError:
    print("lost")
"""
    written: list[ObjectInfo] = []

    async def check(store: Store) -> None:
        written.append(await store.put("x", b"start"))

    run_check(folder_store(tmp_path), check)
    arguments = [sys.executable, "-c", program, str(tmp_path / "root"), written[0].tag]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [
        subprocess.Popen([*arguments, str(number)], stdout=subprocess.PIPE, text=True, env=environment)
        for number in range(4)
    ]
    said = [writer.communicate(timeout=300)[0].strip() for writer in writers]
    assert sorted(said) == ["lost", "lost", "lost", "won"]
    assert (tmp_path / "root/x").read_text() == str(said.index("won"))


def test_a_writer_waits_for_another_ones_lock_before_it_replaces(tmp_path: Path) -> None:
    root = tmp_path / "root"

    async def check(store: Store) -> None:
        await store.put("x", b"old")
        with lock_folder(root):
            write = asyncio.ensure_future(store.put("x", b"new"))
            await until(lambda: any(is_partial(path.name) for path in root.iterdir()))
            await asyncio.sleep(0.02)  # time enough for a writer that does not wait to be caught
            assert (await store.get("x"))[0] == b"old"
        await write
        assert (await store.get("x"))[0] == b"new"

    run_check(folder_store(tmp_path), check)


def test_a_cancelled_call_ends_only_when_its_thread_has() -> None:
    release, seen = threading.Event(), threading.Event()

    def work(cancelled: threading.Event) -> None:
        assert cancelled.wait(60)
        seen.set()
        assert release.wait(60)

    async def main() -> None:
        call = asyncio.ensure_future(run_in_thread(work))
        await asyncio.sleep(0)
        for _ in range(3):
            call.cancel()
            await until(seen.is_set)
            assert not call.done()
        release.set()
        await asyncio.wait([call])
        assert call.cancelled()

    asyncio.run(main())


def test_files_are_stamped_to_the_nanosecond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_456_789)
    run_check(folder_store(tmp_path), lambda store: _put(store, "x"))
    assert (tmp_path / "root/x").stat().st_mtime_ns == 1_700_000_000_123_456_789


def test_a_writer_killed_with_the_lock_blocks_no_other(tmp_path: Path) -> None:
    run_check(folder_store(tmp_path), lambda store: _put(store, "x"))
    program = """
import os, signal, sys
from pathlib import Path
from stoker._stores.local import lock_folder
with lock_folder(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "root")], env=environment, check=False)
    assert killed.returncode == -9
    run_check(folder_store(tmp_path), lambda store: _put(store, "x"))


def test_readers_never_see_a_mixture_of_two_writes(tmp_path: Path) -> None:
    bodies = [bytes([number]) * 300_000 for number in range(4)]

    async def check(store: Store) -> None:
        await store.put("x", bodies[0])
        writes = asyncio.gather(*(store.put("x", bodies[n % 4]) for n in range(16)))
        reads = await asyncio.gather(*(store.get("x") for _ in range(16)))
        await writes
        assert all(body in bodies for body, _ in reads)

    run_check(folder_store(tmp_path), check)


@pytest.fixture
def _no_locks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", refuse)


without_locks = pytest.mark.parametrize(
    "_no_locks", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EBADF], indirect=True, ids=errno.errorcode.get
)


@without_locks
@pytest.mark.usefixtures("_no_locks")
def test_without_locks_one_of_many_creators_of_an_object_succeeds(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        writes = (store.put("x", b"%d" % number, if_absent=True) for number in range(16))
        ended = await asyncio.gather(*writes, return_exceptions=True)
        (won,) = (number for number, info in enumerate(ended) if isinstance(info, ObjectInfo))
        assert sum(isinstance(error, PreconditionFailedError) for error in ended) == 15
        assert await store.get("x") == (b"%d" % won, ended[won])

    run_check(folder_store(tmp_path), check)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["x"]


@without_locks
@pytest.mark.usefixtures("_no_locks")
def test_without_locks_a_write_that_depends_on_a_tag_says_why_it_cannot_be_done(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        first = await store.put("x", b"1")
        with pytest.raises(StoreError, match="no locks") as caught:
            await store.put("x", b"2", if_tag=first.tag)
        assert not isinstance(caught.value, PreconditionFailedError)
        assert (await store.put("x", b"3")) != first
        with pytest.raises(PreconditionFailedError):
            await store.put("x", b"4", if_tag=first.tag)
        await store.delete("x")

    run_check(folder_store(tmp_path), check)


def test_two_creators_without_locks_cannot_both_find_the_place_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    async def check(store: Store) -> None:
        await store.put("x", b"theirs")
        monkeypatch.setattr("fcntl.flock", refuse)
        monkeypatch.setattr("stoker._stores.local._current_tag", lambda _path: None)  # looked before they wrote
        with pytest.raises(PreconditionFailedError):
            await store.put("x", b"ours", if_absent=True)
        assert (await store.get("x"))[0] == b"theirs"

    run_check(folder_store(tmp_path), check)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("folder", S3Options(), "folder takes no options, but options= is of type S3Options; leave it out"),
        ("memory://x", {}, "memory://x takes no options, but options= is of type dict; leave it out"),
        ("s3://bucket", {"region": "x"}, "options= of s3://bucket must be S3Options, not dict"),
        ("gs://bucket", S3Options(), "options= of gs://bucket must be GcsOptions, not S3Options"),
    ],
)
def test_options_of_another_store_are_refused_by_name(url: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        open_store(url, options=options)
