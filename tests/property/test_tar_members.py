from __future__ import annotations

import asyncio
import io
import tarfile
from contextlib import aclosing

import braceexpand
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker._sources.listing import ByteStream, _expand_braces
from stoker._sources.webdataset import read_members
from stoker._stores.location import parse_url
from stoker._stores.object_store import MemoryStore
from support.places import tar_of

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300).filter(
    lambda name: not name.endswith("/")
)


async def read(data: bytes, span_bytes: int, skipped: set[int]) -> list[tuple[str, bytes | None]]:
    store = MemoryStore(parse_url("memory://tars"))
    stream = ByteStream(store, await store.put("x.tar", data), span_bytes=span_bytes)
    found: list[tuple[str, bytes | None]] = []
    async with aclosing(read_members(stream, "x.tar")) as all_members:
        async for member in all_members:
            found.append((member.name, None if len(found) in skipped else await member.read()))
    await stream.aclose()
    return found


@settings(deadline=None, max_examples=150)
@given(
    files=st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=8),
    tar_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    span_bytes=st.integers(1, 5000).map(lambda size: size + 99),
    skipped=st.sets(st.integers(0, 8)),
)
def test_members_are_those_that_tarfile_finds(
    files: list[tuple[str, bytes]], tar_format: int, span_bytes: int, skipped: set[int]
) -> None:
    data = tar_of(files, tar_format=tar_format)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = [info.name for info in tar]
    expected = [
        (name, None if number in skipped else content)
        for number, (name, (_, content)) in enumerate(zip(names, files, strict=True))
    ]
    assert asyncio.run(read(data, span_bytes, skipped)) == expected


NUMBERS, WIDTHS = st.integers(0, 30), st.integers(1, 4)
PIECES = st.one_of(
    st.sampled_from(["train-", "a", "", "/", "x.y"]),
    st.builds(
        "{{{:0{}d}..{:0{}d}}}".format, st.integers(0, 30), st.integers(1, 4), st.integers(0, 30), st.integers(1, 4)
    ),
    st.lists(st.sampled_from(["a", "bc", "1"]), min_size=2, max_size=3).map(lambda names: "{" + ",".join(names) + "}"),
)


@settings(deadline=None)
@given(pieces=st.lists(PIECES, max_size=3))
def test_patterns_stand_for_what_a_shell_expands_them_to(pieces: list[str]) -> None:
    assert list(_expand_braces("".join(pieces))) == list(braceexpand.braceexpand("".join(pieces)))
