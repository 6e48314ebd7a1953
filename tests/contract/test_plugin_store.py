"""The store in docs/plugins.md passes the suite; a method that a smaller one lacks is reported where it is needed."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stoker
from stoker._stores.object_store import MeteredStore, with_meter
from stoker.abc import Deletable, Listable, ObjectInfo, Presigner, RangeReadable, Readable, Store, Writable
from stoker.errors import ConfigError, MissingExtraError, NotFoundError, PermissionDeniedError, StoreError
from stoker.testing import Deviation, StoreLocation, StoreTests, list_keys, read_range
from stoker_torch import Loader
from support.cases import for_each
from support.datasets import numbers, pack_at

EXAMPLE = Path(__file__).parents[2] / "examples" / "sqlite_store.py"


def example() -> Callable[[str], Any]:
    """Return the class of the example, which is no module of any package here."""
    spec = importlib.util.spec_from_file_location("sqlite_store", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["sqlite_store"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    opener: Callable[[str], Any] = module.SqliteStore
    return opener


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Declare entry points of stores, in place of those that are installed."""

    def declare(**points: str) -> None:
        installed = EntryPoints(EntryPoint(name, value, "stoker.stores") for name, value in points.items())
        monkeypatch.setattr(metadata, "entry_points", lambda *, group: installed.select(group=group))

    return declare


class TestSqliteStore(StoreTests):
    """The example, by its URL."""

    @pytest.fixture
    def place(self, tmp_path: Path, install: Callable[..., None]) -> StoreLocation:
        example()
        install(sqlite="sqlite_store:SqliteStore")
        return StoreLocation(
            name="sqlite", url=f"sqlite://{tmp_path}/objects.db/all", deviations=frozenset({Deviation.SLOW})
        )


def test_the_page_shows_the_example_which_has_fewer_than_fifty_lines() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "plugins.md").read_text("utf-8")
    _, _, code = EXAMPLE.read_text("utf-8").partition("import sqlite3\n")
    assert code in page
    _, _, body = code.partition("class SqliteStore")
    assert len([line for line in body.splitlines() if line.strip()]) < 50


def test_a_data_set_is_packed_into_a_plug_in_and_read_from_it(tmp_path: Path, install: Callable[..., None]) -> None:
    example()
    install(sqlite="sqlite_store:SqliteStore")
    place = StoreLocation(url=f"sqlite://{tmp_path}/set.db")
    pack_at(place, 20)
    with stoker.open(place.url) as dataset:
        assert [int(dataset[index]["x"]) for index in (0, 7, 14)] == [0, 7, 14]
    with Loader(place.url, batch_size=4, world_size=1, rank=0) as loader:
        assert sorted(numbers(loader)) == list(range(20))
        assert loader.stats().dollars == 0.0


class Minimal:
    """A store that only reads, of one object."""

    url = "mine://place"

    async def head(self, key: str) -> ObjectInfo:
        if key != "x":
            raise NotFoundError(f"{self.url}/{key} does not exist")
        return ObjectInfo(key=key, size_bytes=4, tag="")

    async def get_range(self, key: str, start: int, end: int, *, into: memoryview, **_: object) -> ObjectInfo:
        info = await self.head(key)
        into[:] = b"0123"[start:end]
        return info


def test_of_a_store_that_reads_ranges_whole_objects_are_read() -> None:
    store = with_meter(Minimal())
    assert isinstance(store, Store)
    assert asyncio.run(store.get("x")) == (b"0123", ObjectInfo(key="x", size_bytes=4, tag=""))
    assert asyncio.run(read_range(store, "x", 1, 3)) == b"12"
    asyncio.run(store.close())


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        (lambda store: store.put("a", b""), "write objects: Minimal has no put"),
        (lambda store: store.delete("a"), "delete objects: Minimal has no delete"),
        (list_keys, "list objects: Minimal has no list"),
    ],
)
def test_a_missing_method_of_a_store_is_reported_where_it_is_needed(call: Callable[[Any], Any], verb: str) -> None:
    with pytest.raises(PermissionDeniedError, match=rf"mine://place/a?: this store cannot {verb}\(\); give the URL of"):
        asyncio.run(call(with_meter(Minimal())))


def test_a_store_that_takes_no_conditions_never_ignores_one() -> None:
    class Careless(Minimal):
        async def put(self, key: str, data: bytes) -> ObjectInfo:
            return ObjectInfo(key=key, size_bytes=len(data), tag="")

    store = with_meter(Careless())
    assert asyncio.run(store.put("a", b"1")).size_bytes == 1
    for condition in ({"if_absent": True}, {"if_tag": "1"}):
        with pytest.raises(StoreError, match=r"mine://place/a: .* put\(\) of Careless takes no if_absent and if_tag"):
            asyncio.run(store.put("a", b"1", **condition))


@for_each("error", [OSError("the disk is gone"), KeyError("x"), TimeoutError()], ids=repr)
@for_each(
    ("method", "call"),
    [
        ("get", lambda store: store.get("a\x1b")),
        ("get_range", lambda store: read_range(store, "a\x1b", 0, 1)),
        ("head", lambda store: store.head("a\x1b")),
        ("list", lambda store: list_keys(store, "a\x1b")),
        ("put", lambda store: store.put("a\x1b", b"")),
        ("delete", lambda store: store.delete("a\x1b")),
    ],
)
def test_an_error_that_a_plug_in_does_not_translate_names_the_store_the_object_and_the_method(
    method: str, call: Callable[[Any], Any], error: Exception
) -> None:
    class Failing:
        url = "mine://place"

        async def fail(self, *_: object, **__: object) -> Any:
            raise error

        async def list(self, *_: object, **__: object) -> Any:
            yield await self.fail()

        get = get_range = head = put = delete = fail

    with pytest.raises(StoreError, match=rf"^mine://place/a\\x1b: {method}\(\) of Failing failed: ") as caught:
        asyncio.run(call(with_meter(Failing())))
    assert caught.value.__cause__ is error
    assert repr(error) in str(caught.value)


def test_a_plug_ins_own_store_errors_and_cancellations_pass_as_they_are() -> None:
    class Waiting(Minimal):
        async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        store = with_meter(Waiting())
        with pytest.raises(NotFoundError, match=r"^mine://place/y does not exist$"):
            await store.head("y")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await store.get("x")

    asyncio.run(main())


def test_what_else_a_plug_in_can_do_is_reached_through_its_meter() -> None:
    class Signing(Minimal):
        async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
            return f"https://example/{key}?{seconds}"

    assert not isinstance(with_meter(Minimal()), Presigner)
    signer = with_meter(with_meter(Signing()))
    assert isinstance(signer, Presigner)
    assert asyncio.run(signer.presign("x", seconds=9)) == "https://example/x?9"


def test_each_capability_is_a_protocol_of_its_own() -> None:
    assert isinstance(Minimal(), RangeReadable)
    for capability in (Readable, Listable, Writable, Deletable, Store):
        assert not isinstance(Minimal(), capability)


def test_an_unknown_scheme_is_refused_with_those_that_are_known(install: Callable[..., None]) -> None:
    install(mine="no_such_module:open", other="x:y")
    with pytest.raises(ConfigError, match=r"no store for ftp:// URLs; use s3://, .*mine://, other://, or a path"):
        stoker.open_store("ftp://host/x")


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("no_such_module:open", "No module named 'no_such_module'"),
        ("support.packing:no_such_name", "no_such_name"),
        ("support.failing_plugin:tier", r"ZeroDivisionError\('.*'\)"),
    ],
)
def test_a_plug_in_that_fails_to_load_is_named_with_the_cause(
    install: Callable[..., None], value: str, cause: str
) -> None:
    install(mine=value)
    with pytest.raises(
        MissingExtraError, match=rf"the store for the scheme mine \({value}\) cannot be loaded: .*{cause}"
    ):
        stoker.open_store("mine://place")


def test_a_plug_in_takes_its_settings_from_its_url(install: Callable[..., None]) -> None:
    install(mine=f"{__name__}:opened")
    store = stoker.open_store("mine://host:9000/a%20b?x=1/")
    assert isinstance(store, MeteredStore)
    assert store.url == "mine://host:9000/a%20b?x=1"
    with pytest.raises(
        ConfigError, match=r"^mine://place is opened by a plug-in, which takes no S3Options; leave options="
    ):
        stoker.open_store("mine://place", options=stoker.S3Options())
    with pytest.raises(ConfigError, match="user or password") as refused:
        stoker.open_store("mine://user:SECRET@place")
    assert "SECRET" not in str(refused.value)


def opened(url: str) -> Any:
    return SimpleNamespace(url=url)


def failing(url: str) -> Any:
    raise OSError(f"no way to {url}")


def test_an_error_of_a_plug_ins_own_names_the_plug_in(install: Callable[..., None]) -> None:
    install(mine=f"{__name__}:failing")
    with pytest.raises(StoreError, match=r"the plug-in .*failing.* failed to open mine://place.*no way to mine"):
        stoker.open_store("mine://place")


def test_schemes_of_our_own_look_for_no_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: pytest.fail("looked"))
    begun = time.process_time()
    for url in ("memory://x", "/tmp/x", "file:///tmp/x", "stoker+https://host/v1/x"):  # noqa: S108 - nothing is opened
        stoker.open_store(url)
    assert time.process_time() - begun < 1
