"""What a deployment may do, read from its environment: every variable, and what is wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError, EventError
from stoker_functions import _deployment as settings_module
from stoker_functions._deployment import DeploymentSettings, IngestSettings
from support.cases import for_each

SECRET = "correct-horse-battery"


def test_an_empty_environment_allows_nothing() -> None:
    found = DeploymentSettings.from_environment({})
    assert (dict(found.datasets), found.sources, found.ingest, found.catalog) == ({}, (), None, "bucket")
    assert (found.catalog_password, found.token_keys, found.timeout_seconds) == (None, "", 60.0)
    for ask in (found.dataset, found.source):
        with pytest.raises(EventError, match="may not use"):
            ask("s3://anything")


def test_every_variable_is_read() -> None:
    ingest = {"dataset": "train", "kind": "image-folder", "classes": ["cat", "dog"], "super_sample_bytes": 1 << 20}
    found = DeploymentSettings.from_environment(
        {
            "STOKER_DATASETS": " train=s3://data/train\n\tother=gs://data/o ",
            "STOKER_SOURCES": "s3://raw/a  gs://raw",
            "STOKER_INGEST": json.dumps(ingest),
            "STOKER_CATALOG": "rediss://cache.example:6380/1",
            "STOKER_CATALOG_PASSWORD": SECRET,
            "STOKER_TOKEN_KEYS": f"k1:{SECRET}",
            "STOKER_TIMEOUT_SECONDS": "540",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "3008",
            "UNRELATED": "x",
        }
    )
    assert dict(found.datasets) == {"train": "s3://data/train", "other": "gs://data/o"}
    assert found.sources == ("s3://raw/a", "gs://raw")
    assert found.ingest == IngestSettings(
        dataset="train", kind="image-folder", classes=("cat", "dog"), super_sample_bytes=1 << 20
    )
    assert (found.catalog, found.catalog_password) == ("rediss://cache.example:6380/1", SECRET)
    assert found.token_keys == f"k1:{SECRET}"
    assert (found.timeout_seconds, found.memory_bytes) == (540.0, 3008 << 20)


def test_variables_that_are_set_to_nothing_are_as_if_they_were_not_set() -> None:
    names = ("DATASETS", "SOURCES", "INGEST", "CATALOG", "CATALOG_PASSWORD", "TOKEN_KEYS", "TIMEOUT_SECONDS")
    assert DeploymentSettings.from_environment(
        {f"STOKER_{name}": "" for name in names}
    ) == DeploymentSettings.from_environment({})


@for_each(
    ("name", "value"),
    [
        ("STOKER_DATASETS", "s3://data/train"),
        ("STOKER_DATASETS", "=s3://data/train"),
        ("STOKER_DATASETS", "../x=s3://data/train"),
        ("STOKER_DATASETS", "a=s3://data/a a=s3://data/b"),
        ("STOKER_DATASETS", f"{'n' * 65}=s3://data"),
        ("STOKER_DATASETS", "a=ftp://data"),
        ("STOKER_DATASETS", "a="),
        ("STOKER_DATASETS", "a=s3://"),
        ("STOKER_SOURCES", "s3://raw http://elsewhere"),
        ("STOKER_INGEST", "train"),
        ("STOKER_INGEST", "[]"),
        ("STOKER_INGEST", "{}"),
        ("STOKER_INGEST", '{"dataset": "other"}'),
        ("STOKER_INGEST", '{"dataset": "train", "kind": "npy"}'),
        ("STOKER_INGEST", '{"dataset": "train", "kind": "image-folder"}'),
        ("STOKER_INGEST", '{"dataset": "train", "kind": "image-folder", "classes": []}'),
        ("STOKER_INGEST", '{"dataset": "train", "kind": "image-folder", "classes": ["a", "a"]}'),
        ("STOKER_INGEST", '{"dataset": "train", "kind": "image-folder", "classes": ["a", 1]}'),
        ("STOKER_INGEST", '{"dataset": "train", "kind": "files", "classes": ["a"]}'),
        ("STOKER_INGEST", '{"dataset": "train", "super_sample_bytes": 0}'),
        ("STOKER_INGEST", '{"dataset": "train", "super_sample_bytes": "8MiB"}'),
        ("STOKER_INGEST", '{"dataset": "train", "supersample_bytes": 8}'),
        ("STOKER_CATALOG", "memcached://cache"),
        ("STOKER_CATALOG", "Redis://cache"),
        ("STOKER_TIMEOUT_SECONDS", "0"),
        ("STOKER_TIMEOUT_SECONDS", "-1"),
        ("STOKER_TIMEOUT_SECONDS", "nan"),
        ("STOKER_TIMEOUT_SECONDS", "inf"),
        ("STOKER_TIMEOUT_SECONDS", "1 minute"),
        ("STOKER_TIMEOUT_SECONDS", "86401"),
    ],
)
def test_a_variable_that_is_not_valid_is_named(name: str, value: str) -> None:
    environ = {"STOKER_DATASETS": "train=s3://data/train", name: value}
    with pytest.raises(ConfigError, match=name):
        DeploymentSettings.from_environment(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STOKER_CATALOG", f"redis://user:{SECRET}@cache:6379/0"),
        ("STOKER_CATALOG", f"redis://:{SECRET}@cache"),
        ("STOKER_CATALOG", f"redis://cache:6379/0?password={SECRET}"),
        ("STOKER_CATALOG", f"{SECRET}@cache"),
        ("STOKER_DATASETS", f"a=s3://key:{SECRET}@data/train"),
        ("STOKER_DATASETS", f"s3://key:{SECRET}@data/train"),
        ("STOKER_SOURCES", f"s3://key:{SECRET}@raw"),
        ("STOKER_SOURCES", f"file://user:{SECRET}@host/raw"),
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_without_repeating_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeploymentSettings.from_environment({name: value})
    assert SECRET not in f"{caught.value!r} {caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("source", ["s3://b", "s3://b/", "s3://b/data", "s3://b/data/train"])
def test_no_data_set_may_lie_among_ingested_raw_objects(source: str) -> None:
    environ = {"STOKER_DATASETS": "o=s3://other train=s3://b/data/train", "STOKER_SOURCES": f"s3://raw {source}"}
    assert DeploymentSettings.from_environment(environ).sources == ("s3://raw", source)
    with pytest.raises(ConfigError, match="without end"):
        DeploymentSettings.from_environment({**environ, "STOKER_INGEST": '{"dataset": "o"}'})
    apart = {**environ, "STOKER_SOURCES": "s3://b/raw s3://b/data/training", "STOKER_INGEST": '{"dataset": "o"}'}
    assert DeploymentSettings.from_environment(apart).ingest is not None


def test_secrets_do_not_show() -> None:
    found = DeploymentSettings(catalog="redis://cache", catalog_password=SECRET, token_keys=f"k:{SECRET}")
    assert SECRET not in f"{found} {found!r} {[found]}"


@pytest.mark.parametrize(
    ("root", "inside", "outside"),
    [
        (
            "s3://b/train",
            ["s3://b/train", "s3://b/train/", "s3://b/train/x", "s3://b//train"],
            [
                "s3://b/training",
                "s3://b/trai",
                "s3://b",
                "s3://b/x/train",
                "gs://b/train",
                "s3://B/train",
                "s3://bb/train",
            ],
        ),
        ("s3://b", ["s3://b", "s3://b/", "s3://b/any/thing"], ["s3://b2", "s3://b-2/b", "memory://b"]),
        ("gs://b/a/", ["gs://b/a", "gs://b/a/b"], ["gs://b/ab", "gs://b/A"]),
        # A bucket takes dots and percent signs literally: these are folders of these names.
        ("s3://b/train", ["s3://b/train/../train"], ["s3://b/x/../train", "s3://b/%74rain"]),
    ],
)
def test_only_urls_at_or_below_a_permitted_place_are_allowed(root: str, inside: list[str], outside: list[str]) -> None:
    found = DeploymentSettings(datasets={"train": root}, sources=(root,))
    for ask in (found.dataset, found.source):
        for url in inside:
            assert ask(url) == url
        for url in outside:
            with pytest.raises(EventError, match="may not use"):
                ask(url)


@pytest.mark.parametrize(
    "url", ["", "s3://", "http://b/train", "s3://k:s@b/train", "\0", "s3://b/\ud800", "file://h/x"]
)
def test_what_is_no_url_is_an_event_error(url: str) -> None:
    found = DeploymentSettings(datasets={"train": "s3://b/train"}, sources=("s3://b",))
    for ask in (found.dataset, found.source):
        with pytest.raises(EventError):
            ask(url)


def test_of_folders_dots_are_resolved_and_links_followed(tmp_path: Path) -> None:
    root, secret = tmp_path / "raw", tmp_path / "secret"
    for folder in (root / "a", secret, tmp_path / "raw-2"):
        folder.mkdir(parents=True)
    (root / "out").symlink_to(secret)
    (root / "in").symlink_to(root / "a")
    found = DeploymentSettings(sources=(str(root),))
    for url in (str(root), f"{root}/a", f"file://{root}/a", f"{root}/x/../a", f"{root}/in", f"{root}/./"):
        assert found.source(url) == url
    for url in (
        f"{root}/..",
        f"{root}/../secret",
        f"{root}/a/../../secret",
        f"file://{root}/../secret",
        f"file://{root}/%2e%2e/secret",
        f"{root}/out",
        f"{root}/out/deeper",
        f"{tmp_path}/raw-2",
        str(tmp_path),
        "/",
        "file:///etc",
    ):
        with pytest.raises(EventError, match="may not use"):
            found.source(url)


def test_a_place_that_is_itself_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = DeploymentSettings(sources=(f"{tmp_path}/link",))
    assert found.source(f"{tmp_path}/real/a")
    assert found.source(f"{tmp_path}/link/a")


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of a control group, which are not there yet."""
    files = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    monkeypatch.setattr(settings_module, "_CGROUP_LIMITS", [str(file) for file in files])
    return files


@pytest.mark.parametrize(
    ("text", "expected"),
    [("536870912\n", 536870912), ("max\n", None), ("9223372036854771712", None), ("", None), ("nonsense", None)],
)
def test_memory_is_what_the_control_group_says(limits: list[Path], text: str, expected: int | None) -> None:
    at_hand: Any = DeploymentSettings.from_environment({}).memory_bytes
    assert at_hand >= 512 << 20
    assert at_hand <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") or at_hand == 512 << 20
    for file in limits:
        file.write_text(text)
        found = DeploymentSettings.from_environment({}).memory_bytes
        assert found == expected or (expected is None and found >= 512 << 20)
        file.unlink()


def test_memory_is_what_lambda_says_before_all_else(limits: list[Path]) -> None:
    limits[0].write_text("999999999")
    assert DeploymentSettings.from_environment({"AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "1769"}).memory_bytes == 1769 << 20
    assert DeploymentSettings.from_environment({"AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "a lot"}).memory_bytes == 999999999
