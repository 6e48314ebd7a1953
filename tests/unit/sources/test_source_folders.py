from __future__ import annotations

import os
from contextlib import aclosing
from pathlib import Path

import pytest

from stoker import Array, Bytes, Text, open_store
from stoker._sources import ObjectSource
from stoker.errors import ConfigError, NotFoundError, ObjectChangedError, PackError
from support.places import look, put_all, read_all, tar_of, with_source

TAR = tar_of([("x.txt", b"x")])
IMAGES = {
    "dogs/2.PNG": b"two",
    "dogs/deep/1.jpg": b"one",
    "cats/ü +%41 x.jpeg": b"cat",
    "a b/0.webp": b"",
}


@pytest.fixture(params=["local", "memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    names = {"local": str(tmp_path / "in put"), "file": (tmp_path / "in put").as_uri()}
    return names.get(request.param, f"memory://{request.function.__name__}/in put")


def test_an_image_folder_gives_bytes_label_and_path_in_order_of_path(url: str) -> None:
    put_all(url, IMAGES)
    source = look(url)
    assert source.kind == "image-folder"
    assert source.samples == 4
    assert source.size_bytes == 9
    assert dict(source.schema) == {
        "image": Bytes(),
        "label": Array("int64", classes=("a b", "cats", "dogs")),
        "path": Text(),
    }
    assert [(where, s["image"], s["label"], s["path"]) for where, s in read_all(url)] == [
        (key, IMAGES[key], label, key)
        for key, label in [("a b/0.webp", 0), ("cats/ü +%41 x.jpeg", 1), ("dogs/2.PNG", 2), ("dogs/deep/1.jpg", 2)]
    ]


def test_files_give_data_and_path(url: str) -> None:
    put_all(url, {"b/x": b"1", "a.bin": b"22", "ä": b""})
    assert look(url).kind == "files"
    assert [sample for _, sample in read_all(url)] == [
        {"data": b"22", "path": "a.bin"},
        {"data": b"1", "path": "b/x"},
        {"data": b"", "path": "ä"},
    ]


def test_reading_starts_at_any_sample(url: str) -> None:
    put_all(url, {f"{number:02}": bytes([number]) for number in range(30)})
    whole = read_all(url)
    for start in (0, 1, 17, 29, 30):
        assert read_all(url, start=start) == whole[start:]


def test_hidden_files_and_folder_placeholders_are_no_samples() -> None:
    url = "memory://hidden"
    put_all(url, {"a/.DS_Store": b"", "a/._x.jpg": b"", ".git/x.jpg": b"", "a/": b"", "a/x.jpg": b"x"})
    assert [where for where, _ in read_all(url)] == ["a/x.jpg"]
    assert look(url).notes == ()


def test_files_that_an_image_folder_leaves_out_are_noted() -> None:
    put_all("memory://notes", {"README.md": b"", "cats/1.jpg": b""})
    assert look("memory://notes").notes == ("1 of 2 files were left out: no image in a sub-folder (first: README.md)",)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (["a/1.jpg", "b/2.png", "labels.csv"], "image-folder"),
        (["1.jpg", "2.jpg"], "files"),
        (["a/x.txt", "y.jpg"], "files"),
        (["0.tar", "b/1.tar"], "webdataset"),
    ],
)
def test_the_kind_of_a_folder_is_detected_from_its_names(keys: list[str], kind: str) -> None:
    url = f"memory://kind-{kind}-{len(keys)}-{keys[0].replace('/', '-')}"
    put_all(url, dict.fromkeys(keys, b"x") | {key: TAR for key in keys if key.endswith(".tar")})
    assert look(url).kind == kind


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        (["a/1.jpg", "a/notes.txt"], "--kind image-folder"),
        (["0.tar", "index.json"], "--kind webdataset"),
        (["0.npy", "1.npy"], "--append"),
        (["a.wav", "b.wav", "labels.csv"], r"stoker\.Packer"),
        (["train.tar.gz"], "unpack"),
        (["manifest.safetensors", "data/1.safetensors"], "the store's own tools"),
    ],
)
def test_an_unclear_folder_is_an_error_that_says_what_to_say(keys: list[str], remedy: str) -> None:
    url = f"memory://unclear-{keys[0].replace('/', '-')}"
    put_all(url, dict.fromkeys(keys, b"x"))
    with pytest.raises(ConfigError, match=f"--kind files.*{remedy}"):
        look(url)
    assert look(url, "files").samples == len(keys)


SPLIT = {"train/cat/1.jpg": b"1", "train/dog/2.jpg": b"2", "val/cat/3.jpg": b"3"}


@pytest.mark.parametrize("kind", [None, "image-folder"])
def test_splits_above_the_class_folders_are_an_error_that_names_them(url: str, kind: str | None) -> None:
    put_all(url, SPLIT)
    with pytest.raises(ConfigError, match=r"pack .+/train, .+/val one by one"):
        look(url, kind)
    column = look(f"{url}/train").schema["label"]
    assert isinstance(column, Array)
    assert column.classes == ("cat", "dog")


def test_folders_above_all_class_folders_are_an_error_unless_declared_the_classes(url: str) -> None:
    put_all(url, {"pets/cat/1.jpg": b"1", "pets/dog/2.jpg": b"2"})
    with pytest.raises(ConfigError, match=r"pack .+/pets one by one.*--kind image-folder if pets is a class"):
        look(url)
    assert look(url, "image-folder").samples == 2


def test_a_class_named_like_a_split_can_be_declared_a_class(url: str) -> None:
    put_all(url, {"test/patient-1/1.jpg": b"1", "control/patient-2/2.jpg": b"2"})
    with pytest.raises(ConfigError, match=r"pack .+/test one by one.*--kind image-folder if control is a class"):
        look(url)
    column = look(url, "image-folder").schema["label"]
    assert isinstance(column, Array)
    assert column.classes == ("control", "test")


def test_class_folders_far_below_are_named_by_the_folder_they_are_in(url: str) -> None:
    put_all(url, {f"data/{key}": content for key, content in SPLIT.items()})
    with pytest.raises(ConfigError, match=r"pack .+/data/train, .+/data/val one by one"):
        look(url)


def test_the_fingerprint_changes_with_content_names_and_kind_and_with_nothing_else() -> None:
    url = "memory://fingerprint"
    put_all(url, {"a/1.jpg": b"1", "b/2.jpg": b"2"})
    first = look(url).fingerprint
    assert look(url).fingerprint == first
    assert look(url, "files").fingerprint != first
    put_all(url, {".hidden": b"", "b/.DS_Store": b""})
    assert look(url).fingerprint == first
    put_all(url, {"b/2.jpg": b"3"})
    second = look(url).fingerprint
    assert second != first
    put_all(url, {"b/3.jpg": b"3"})
    assert look(url).fingerprint not in (first, second)


def test_the_fingerprint_does_not_depend_on_where_the_source_is(tmp_path: Path) -> None:
    put_all(str(tmp_path / "one"), {"x": b"1"})
    (tmp_path / "one").rename(tmp_path / "two")
    first = look(str(tmp_path / "two")).fingerprint
    (tmp_path / "two").rename(tmp_path / "three")
    assert look(str(tmp_path / "three")).fingerprint == first


def test_a_file_that_changes_after_it_was_listed_is_an_error() -> None:
    async def check(source: ObjectSource) -> None:
        await open_store("memory://changing").put("2", b"new")
        async with aclosing(source.read()) as samples:
            assert (await anext(samples))[1]["data"] == b"old"
            with pytest.raises(ObjectChangedError, match="/2"):
                await anext(samples)

    put_all("memory://changing", {"1": b"old", "2": b"old"})
    with_source("memory://changing", check)


def test_links_inside_the_folder_are_followed_and_loops_end(tmp_path: Path) -> None:
    put_all(str(tmp_path), {"real/x": b"x"})
    (tmp_path / "inside").symlink_to(tmp_path / "real" / "x")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / ".hidden").symlink_to("/nowhere")
    assert [where for where, _ in read_all(str(tmp_path))] == ["inside", "real/x"]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A folder of links to files elsewhere, as hubs cache snapshots of a repository."""
    put_all(str(tmp_path / "blobs"), {"aa": b"a", "folder/bb": b"b", "folder/cc": b"c"})
    folder = tmp_path / "snapshot"
    put_all(str(folder), {"own": b"own"})
    (folder / "sub").mkdir()
    (folder / "sub" / "a").symlink_to("../../blobs/aa")
    (folder / "sub" / "more").symlink_to(tmp_path / "blobs" / "folder")
    return folder


def test_links_out_of_the_folder_are_counted_in_an_error(snapshot: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 links out of it \(first: sub/a -> \.\./\.\./blobs/aa\).*--follow-links"):
        look(str(snapshot))
    assert [(where, sample["data"]) for where, sample in read_all(str(snapshot), follow_links=True)] == [
        ("own", b"own"),
        ("sub/a", b"a"),
        ("sub/more/bb", b"b"),
        ("sub/more/cc", b"c"),
    ]


def test_there_are_no_links_to_follow_in_a_bucket() -> None:
    put_all("memory://no-links", {"x": b"x"})
    with pytest.raises(ConfigError, match="--follow-links is for links in a local folder"):
        look("memory://no-links", follow_links=True)


@pytest.mark.parametrize("follow_links", [False, True])
def test_links_to_nothing_are_an_error(snapshot: Path, follow_links: bool) -> None:
    (snapshot / "sub" / "more").unlink()
    (snapshot / "sub" / "a").unlink()
    (snapshot / "broken").symlink_to("nothing")
    (snapshot / "itself").symlink_to("itself")
    with pytest.raises(PackError, match=r"2 links to files that are missing or unreadable.*broken -> nothing"):
        look(str(snapshot), follow_links=follow_links)


def test_links_in_folders_outside_count_too_and_loops_there_end(snapshot: Path, tmp_path: Path) -> None:
    outside = tmp_path / "blobs" / "folder"
    (outside / "back").symlink_to(snapshot)
    (outside / "itself").symlink_to(outside)
    assert len(read_all(str(snapshot), follow_links=True)) == 4
    (outside / "broken").symlink_to("nothing")
    with pytest.raises(PackError, match="sub/more/broken -> nothing"):
        look(str(snapshot), follow_links=True)


def test_a_link_to_what_contains_the_folder_is_never_followed(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "up").symlink_to(tmp_path)
    with pytest.raises(PackError, match=f"{snapshot}/up is a link to {tmp_path}, which contains"):
        look(str(snapshot), follow_links=True)


def test_a_folder_that_is_a_link_itself_is_read(tmp_path: Path) -> None:
    put_all(str(tmp_path / "in"), {"x": b"x"})
    (tmp_path / "link").symlink_to(tmp_path / "in")
    assert [where for where, _ in read_all(str(tmp_path / "link"))] == ["x"]


def test_a_file_too_large_for_any_sample_is_named_before_anything_is_read(tmp_path: Path) -> None:
    put_all(str(tmp_path), {"small": b"x"})
    with (tmp_path / "video.mp4").open("wb") as file:
        os.truncate(file.fileno(), (1 << 30) + 1)
    with pytest.raises(
        PackError, match=r"video\.mp4 has 1073741825 bytes; a sample may have at most 1073741824 \(1 GiB\)"
    ):
        look(str(tmp_path))


def test_an_empty_or_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="has no files to pack"):
        look(str(tmp_path))
    with pytest.raises(NotFoundError, match="nowhere"):
        look(str(tmp_path / "nowhere"))
    put_all("memory://emptyish", {"other/x": b""})
    with pytest.raises(PackError, match="memory://emptyish/folder"):
        look("memory://emptyish/folder")


def test_no_image_in_a_sub_folder_is_an_error_with_a_remedy() -> None:
    put_all("memory://flat", {"1.jpg": b"x"})
    with pytest.raises(PackError, match="--kind files"):
        look("memory://flat", "image-folder")


def test_wrong_kinds_are_refused(tmp_path: Path) -> None:
    put_all(str(tmp_path), {"x.txt": b"x", "y.npy": b"x"})
    with pytest.raises(ConfigError, match="no kind of source 'parquet'"):
        look(str(tmp_path), "parquet")
    with pytest.raises(ConfigError, match=r"x\.txt is a file of no known kind"):
        look(str(tmp_path / "x.txt"))
    with pytest.raises(ConfigError, match="for a folder"):
        look(str(tmp_path / "y.npy"), "files")
    with pytest.raises(ConfigError, match="for one file"):
        look(str(tmp_path), "npy")
