from __future__ import annotations

import gzip
import io
import re
import tarfile
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import webdataset

from stoker import Array, Bytes, Text
from stoker._sources import ObjectSource
from stoker._sources.webdataset import WebDataset
from stoker.errors import ConfigError, NotFoundError, PackError, StokerError
from support.cases import for_each
from support.places import look, put_all, read_all, tar_of, with_source

MEMBERS = [
    ("a/0001.jpg", b"JPEG"),
    ("a/0001.cls", b" 7\n"),
    ("a/0001.seg.png", b"PNG"),
    ("a/0001.json", b'{"x": 1}'),
    ("a/0002.cls", b"-3"),
    ("a/0002.jpg", b"JPEG2" * 1000),
    ("a/0002.seg.png", b""),
    ("a/0002.json", "ü".encode()),
]
SAMPLES = [
    {"key": "a/0001", "jpg": b"JPEG", "cls": 7, "seg_png": b"PNG", "json": '{"x": 1}'},
    {"key": "a/0002", "jpg": b"JPEG2" * 1000, "cls": -3, "seg_png": b"", "json": "ü"},
]


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "a b+ü") if request.param == "local" else f"memory://{request.function.__name__}/a b+ü"


def samples_of(url: str, start: int = 0) -> list[dict[str, object]]:
    return [sample for _, sample in read_all(url, start=start)]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_with_one_base_name_are_a_sample(folder: str, tar_format: int) -> None:
    put_all(folder, {"x.tar": tar_of(MEMBERS, tar_format=tar_format)})
    source = look(f"{folder}/x.tar")
    assert (source.kind, source.samples) == ("webdataset", None)
    columns = {"key": Text(), "jpg": Bytes(), "cls": Array("int64"), "seg_png": Bytes(), "json": Text()}
    assert list(source.schema.items()) == list(columns.items())
    assert samples_of(f"{folder}/x.tar") == SAMPLES
    assert read_all(f"{folder}/x.tar")[1][0].endswith("x.tar: sample 'a/0002'")


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_odd_names_are_kept_whole(tar_format: int) -> None:
    name = "ä/" + "long name " * 40 + "+%41"
    put_all("memory://long", {"x.tar": tar_of([(f"{name}.txt", b"x")], tar_format=tar_format)})
    assert samples_of("memory://long/x.tar") == [{"key": name, "txt": "x"}]


def test_what_webdataset_writes_is_read(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
        for number in range(20):
            writer.write(
                {"__key__": f"{number:03}", "cls": number, "txt": str(number), "bin": bytes([number] * number)}
            )
    assert samples_of(str(tmp_path / "x.tar")) == [
        {"key": f"{number:03}", "bin": bytes([number] * number), "cls": number, "txt": str(number)}
        for number in range(20)
    ]


def test_tars_of_a_folder_or_pattern_are_read_one_after_the_other(folder: str) -> None:
    tars = {f"t-{n:03}.tar": tar_of([(f"{n}.txt", b"1"), (f"{n}b.txt", b"2")]) for n in range(12)}
    put_all(folder, tars)
    keys = [key for n in range(12) for key in (f"{n}", f"{n}b")]
    assert [sample["key"] for sample in samples_of(folder)] == keys
    assert [sample["key"] for sample in samples_of(f"{folder}/t-{{003..001}}.tar")] == ["3", "3b", "2", "2b", "1", "1b"]
    assert [sample["key"] for sample in samples_of(f"{folder}/{{t}}-{{011,000}}.tar")] == [
        "11", "11b", "0", "0b",
    ]  # fmt: skip
    assert [sample["key"] for sample in samples_of(folder, start=5)] == keys[5:]


def test_one_sample_may_not_span_two_tars() -> None:
    put_all("memory://border", {"0.tar": tar_of([("a.txt", b"1")]), "1.tar": tar_of([("a.txt", b"2")])})
    assert samples_of("memory://border") == [{"key": "a", "txt": "1"}, {"key": "a", "txt": "2"}]


def test_a_pattern_that_names_missing_tars_is_an_error_with_the_first() -> None:
    put_all("memory://gaps", {"t-0.tar": tar_of(MEMBERS), "t-2.tar": tar_of(MEMBERS)})
    with pytest.raises(NotFoundError, match=r"t-1\.tar does not exist \(1 of 3 are missing\)"):
        look("memory://gaps/t-{0..2}.tar")
    with pytest.raises(ConfigError, match="more than"):
        look("memory://gaps/t-{0..999999999999999}.tar")


def test_the_fingerprint_follows_the_tars() -> None:
    put_all("memory://prints", {"x.tar": tar_of(MEMBERS)})
    first = look("memory://prints/x.tar").fingerprint
    put_all("memory://prints", {"x.tar": tar_of(MEMBERS[::-1])})
    assert look("memory://prints/x.tar").fingerprint != first


def test_folders_links_hidden_files_and_files_without_extension_belong_to_no_sample() -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, kind in [("a", tarfile.DIRTYPE), ("a/l.txt", tarfile.SYMTYPE), ("a/h.txt", tarfile.LNKTYPE)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("a/.hidden", "a/README", "a/._x.txt", "a.b/x.txt"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    put_all("memory://others", {"x.tar": data.getvalue()})
    assert samples_of("memory://others/x.tar") == [{"key": "a.b/x", "txt": "abc"}]


def test_names_that_leave_the_folder_are_only_names(tmp_path: Path) -> None:
    put_all(str(tmp_path), {"x.tar": tar_of([("../../evil.txt", b"x"), ("/etc/evil.txt", b"y")])})
    assert [sample["key"] for sample in samples_of(str(tmp_path / "x.tar"))] == ["../../evil", "/etc/evil"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["x.tar"]


def sparse() -> bytes:
    info = tarfile.TarInfo("a.txt")
    info.type = tarfile.GNUTYPE_SPARSE
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def pax(record: bytes, size: int | None = None) -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(record) if size is None else size
    return info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(-(-len(record) // 512) * 512, b"\0")


def sized(size: int) -> bytes:
    info = tarfile.TarInfo("a.txt")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


GOOD = tar_of(MEMBERS)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no samples"),
    "only zeros": (bytes(10240), "no samples"),
    "no extension": (tar_of([("README", b"x")]), "no samples"),
    "gzip": (gzip.compress(GOOD, compresslevel=0), "decompress a compressed tar"),
    "text": (b"hello " * 200, "not a tar"),
    "cut in a header": (GOOD[:1500], "is truncated"),
    "cut in content": (tar_of([("a.txt", b"x" * 2000)])[:1000], "is truncated"),
    "bad checksum": (GOOD[:10] + b"X" + GOOD[11:], "not a tar"),
    "negative size": (sized(-5), "impossible size"),
    "huge size": (sized(1 << 60), "is truncated"),
    "sparse": (sparse(), "sparse"),
    "pax sparse": (pax(b"22 GNU.sparse.major=1\n") + GOOD, "sparse"),
    "pax size": (pax(b"13 size=huge\n") + GOOD, "impossible size"),
    "pax negative": (pax(b"11 size=-1\n") + GOOD, "impossible size"),
    "pax beyond": (pax(b"19 size=9999999999\n") + GOOD, "is truncated"),
    "pax length": (pax(b"99 path=x\n") + GOOD, "pax header"),
    "pax zero": (pax(b"0 path=x\n") + GOOD, "pax header"),
    "pax garbage": (pax(b"hello\n") + GOOD, "pax header"),
    "pax large": (pax(b"", 2 << 20) + bytes(3 << 20), "extended header"),
    "not an integer": (tar_of([("a.cls", b"cat")]), "not an integer"),
    "not text": (tar_of([("a.txt", b"\xff")]), "not UTF-8"),
    "bad column": (tar_of([("a.b-c", b"x")]), "column name 'b-c'"),
    "key column": (tar_of([("a.key", b"x")]), "column 'key' already"),
    "column twice": (tar_of([("a.txt", b"x"), ("a.TXT", b"x")]), "column 'txt' already"),
    "other columns": (tar_of([("a.txt", b"x"), ("b.txt", b"x"), ("b.cls", b"1")]), r"sample 'b' has the columns"),
}


@for_each("name", HOSTILE)
def test_a_hostile_or_unfit_tar_is_an_error_that_names_it(name: str) -> None:
    content, message = HOSTILE[name]
    put_all("memory://hostile", {"bad.tar": content})
    with pytest.raises(PackError, match=rf"memory://hostile/bad\.tar.*{message}"):
        read_all("memory://hostile/bad.tar")


@pytest.mark.parametrize("parts", [1, 4])
def test_a_sample_larger_than_any_may_be_is_an_error_that_names_it(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker._sources.listing.MAX_SAMPLE_BYTES", 4001)  # with the key, of 1 byte
    name = f"memory://large/{parts}.tar"
    members = [(f"a.b{n}", bytes(4000 // parts)) for n in range(parts)]
    put_all("memory://large", {f"{parts}.tar": tar_of(members)})
    assert len(samples_of(name)) == 1
    put_all("memory://large", {f"{parts}.tar": tar_of([*members[:-1], (members[-1][0], bytes(4000 // parts + 1))])})
    with pytest.raises(PackError, match=rf"{re.escape(name)}.* makes a sample of 4002 bytes; .* at most 4001 "):
        read_all(name)


def test_a_tar_without_padding_or_end_is_read() -> None:
    put_all("memory://unpadded", {"x.tar": tar_of([("a.txt", b"abc")])[: 512 + 3]})
    assert samples_of("memory://unpadded/x.tar") == [{"key": "a", "txt": "abc"}]


CUT = {  # three samples; where a tar ends, and what is missing there
    "a.tar": tar_of([("1.txt", b"a"), ("2.txt", b"b")]),
    "b.tar": tar_of([("3.txt", bytes(1000))])[: 512 + 1024],
    "c.tar": tar_of([("4.txt", b"d"), ("5.txt", b"e")])[:1024],
}


def test_tars_that_end_at_a_members_border_without_an_end_marker_are_counted(folder: str) -> None:
    async def read(source: ObjectSource) -> int:
        assert list(source.notes) == []
        async with aclosing(source.read()) as samples:
            count = len([sample async for sample in samples])
        (note,) = source.notes
        assert note.startswith("warning: no end marker in 2 of 3 tars (first: b.tar)")
        return count

    put_all(folder, CUT)
    assert with_source(folder, read) == 4


def test_a_tar_without_an_end_marker_is_an_error_where_it_may_not_be(folder: str) -> None:
    put_all(folder, CUT)
    with pytest.raises(PackError, match=r"/b\.tar has no end marker.*without --strict"):
        read_all(folder, strict=True)
    assert len(read_all(f"{folder}/a.tar", strict=True)) == 2


def test_the_last_bytes_tell_which_tars_have_no_end_marker(folder: str) -> None:
    async def check(source: ObjectSource) -> tuple[str, ...]:
        assert isinstance(source, WebDataset)
        await source.check_ends()
        return source.notes

    put_all(folder, {name: CUT[name] for name in ("a.tar", "c.tar")})
    (note,) = with_source(folder, check)
    assert "no end marker in 1 of 2 tars (first: c.tar)" in note
    with pytest.raises(PackError, match=r"/c\.tar has no end marker"):
        with_source(folder, check, strict=True)


def with_checksums(data: bytearray) -> bytes:
    """Make the checksums of the headers true again, so that what else they claim is believed."""
    for start in range(0, len(data) - 511, 512):
        header = data[start : start + 512]
        if header[257:262] == b"ustar":
            data[start + 148 : start + 156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:]))
    return bytes(data)


def test_no_bit_flip_or_cut_causes_anything_but_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker._sources.webdataset.PEEK_SPAN_BYTES", 700)
    rng = np.random.default_rng(3)
    good, errors = pax(b"14 path=b.txt\n") + tar_of(MEMBERS[:4]), 0
    for _ in range(300):
        data = bytearray(good)
        if rng.random() < 0.3:
            del data[int(rng.integers(len(data))) :]
        else:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        put_all("memory://flips", {"x.tar": with_checksums(data) if rng.random() < 0.8 else bytes(data)})
        try:
            read_all("memory://flips/x.tar")
        except StokerError:
            errors += 1
    assert 30 < errors < 300
