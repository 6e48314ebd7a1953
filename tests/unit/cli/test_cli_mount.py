"""``stoker mount`` before anything is mounted: what is wrong with the machine, the folder or the data set."""

from __future__ import annotations

import builtins
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stoker
from stoker import cli
from stoker._files import fuse
from stoker.cli import mount

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the checks of other systems are those of libfuse")


class Binding(SimpleNamespace):
    """A fake mfusepy: it connects, and ends when the data set is unmounted or at once."""

    def __init__(self, error: int | None = None, *, connects: bool = True, major: int = 3) -> None:
        super().__init__(fuse_version_major=major, fuse_version_minor=16)
        self.error, self.connects, self.unmounted = error, connects, threading.Event()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def FUSE(self, files: Any, folder: str, **options: Any) -> None:  # noqa: N802 - the name of mfusepy
        self.calls.append((folder, options))
        if self.connects:
            files.init("/")
            assert self.unmounted.wait(60)
        if self.error is not None:
            raise RuntimeError(self.error)

    def fuse_exit(self) -> None:
        self.unmounted.set()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Binding:
    found = Binding()
    monkeypatch.setattr(mount, "load_binding", lambda: found)
    monkeypatch.setattr(fuse, "_DEVICE", Path(os.devnull))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


@pytest.fixture
def url(tmp_path: Path) -> str:
    with stoker.Packer(tmp_path / "a,b", schema={"image": stoker.Bytes(), "label": stoker.Array("int64")}) as packer:
        packer.extend({"image": b"x" * number, "label": number} for number in range(5))
    return f"{tmp_path}/a,b"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["mount", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_it_says_when_the_files_are_visible_and_ends_when_it_is_unmounted(
    run: Run, binding: Binding, url: str, folder: Path
) -> None:
    timer = threading.Timer(0.2, binding.unmounted.set)
    timer.start()
    code, out, err = run(url, folder, "--content", "image", "--memory", "64MB")
    timer.join()
    assert (code, err) == (0, "")
    assert out.startswith(f"mounted {url} version 1 at {folder}: 5 samples, ")
    assert out.endswith(f"unmount with Ctrl-C or fusermount3 -u {folder}\n")
    ((mounted_at, options),) = binding.calls
    assert mounted_at == str(folder)
    assert options["ro"] is options["foreground"] is True
    assert not options.keys() & {"allow_other", "allow_root", "nonempty", "nothreads"}
    assert options["fsname"] == url.replace(",", "\\,")


@pytest.mark.parametrize(("major", "program"), [(2, "fusermount"), (3, "fusermount3")])
def test_a_mount_whose_process_has_ended_is_explained(
    run: Run, binding: Binding, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, major: int, program: str
) -> None:
    def lost(_: object) -> None:
        raise OSError(107, os.strerror(107))

    binding.fuse_version_major = major
    monkeypatch.setattr(os, "listdir", lost)
    code, _, err = run(url, folder)
    assert code == 2
    assert f"if a mount there has lost its process, unmount it: {program} -u {folder}\n" in err


@pytest.mark.usefixtures("binding")
def test_a_folder_where_nothing_can_be_mounted_is_refused(
    run: Run, url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "item").touch()
    wanted = {
        tmp_path / "none": f"none does not exist; create it with mkdir -p {tmp_path}/none",
        tmp_path / "file": "file is not a folder; give an empty folder",
        tmp_path / "full": "full is not empty: it has 'item'; give an empty folder",
        Path("/proc"): "something is mounted at /proc already; unmount it (fusermount3 -u /proc), or give another",
    }
    for place, message in wanted.items():
        code, _, err = run(url, place)
        assert (code, message in err) == (2, True), err
    monkeypatch.setattr(os, "access", lambda path, _: path != folder)
    assert "is not writable for this user" in run(url, folder)[2]


@pytest.mark.usefixtures("binding")
def test_a_bad_data_set_or_setting_is_refused_before_the_mount(run: Run, url: str, folder: Path) -> None:
    wanted = {
        (f"{folder}/none", "--content", "image"): (1, "there is no data set"),
        (url, "--content", "image", "--at", "7"): (1, "has no version 7"),
        (url, "--content", "picture"): (2, "no column picture"),
        (url, "--template", "x"): (2, "must begin with samples/"),
        (url, "--template", "samples/a"): (2, "sample 0 would be the file 'samples/a', and so would sample 1"),
        (url, "--memory", "1KB"): (1, "is too small"),
        (url, "--template", "samples/{__id__}" + "x" * 300): (2, "a name of 301 bytes"),
    }
    for (place, *arguments), (code, message) in wanted.items():
        found, out, err = run(place, folder, *arguments)
        assert (found, out, message in err) == (code, "", True), err


def test_a_machine_without_fuse_is_refused(
    run: Run, binding: Binding, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "_DEVICE", folder / "fuse")
    code, _, err = run(url, folder)
    assert (code, "fuse does not exist, but a mount needs it; run modprobe fuse as root" in err) == (1, True)
    assert "--device /dev/fuse --cap-add SYS_ADMIN" in err
    monkeypatch.setattr(fuse, "_DEVICE", Path(os.devnull))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(folder))
    code, _, err = run(url, folder)
    assert (code, "fusermount3 is not installed" in err, "apt install fuse3" in err) == (1, True, True)
    binding.fuse_version_major = 2
    assert "fusermount is not installed" in run(url, folder)[2]


def test_a_mount_that_fails_and_one_that_breaks_are_errors(
    run: Run, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "_DEVICE", Path(os.devnull))
    monkeypatch.setattr(mount, "load_binding", lambda: Binding(3, connects=False))
    code, out, err = run(url, folder, "--content", "image")
    assert (code, out) == (1, "")
    assert f"could not be mounted at {folder}: libfuse returned 3, and has printed the cause above" in err
    broken = Binding(8)
    broken.unmounted.set()
    monkeypatch.setattr(mount, "load_binding", lambda: broken)
    code, out, err = run(url, folder, "--content", "image")
    assert (code, f"the mount at {folder} has failed: libfuse returned 8" in err) == (1, True), err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("No module named 'mfusepy'", name="mfusepy"),
            "needs mfusepy; pip install 'stoker[mount]'",
        ),
        (
            OSError("Unable to find libfuse"),
            "libfuse cannot be loaded (Unable to find libfuse); install it: apt install",
        ),
        (AttributeError("Found library x is too old: 2.5"), "is too old: 2.5); install it"),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(
    run: Run, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    inner = builtins.__import__

    def missing(name: str, *rest: Mapping[str, object]) -> object:
        if name == "mfusepy":
            raise error
        return inner(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    code, out, err = run(url, folder)
    assert (code, out, message in err) == (1, "", True), err


def test_libfuse_3_is_preferred_unless_the_user_names_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    inner = builtins.__import__

    def watched(name: str, *rest: Mapping[str, object]) -> object:
        if name == "mfusepy":
            seen.append(os.environ.get("FUSE_LIBRARY_NAME"))
            return SimpleNamespace()
        return inner(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", watched)
    for variables, installed in (({}, "libfuse3.so.3"), ({}, None), ({"FUSE_LIBRARY_NAME": "fuse"}, "libfuse3.so.3")):
        with monkeypatch.context() as patch:
            for name in ("FUSE_LIBRARY_PATH", "FUSE_LIBRARY_NAME"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(fuse, "find_library", lambda _, installed=installed: installed)
            fuse.load_binding()
            assert os.environ.get("FUSE_LIBRARY_NAME") == variables.get("FUSE_LIBRARY_NAME")
    assert seen == ["fuse3", None, "fuse"]
