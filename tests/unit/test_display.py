"""What a terminal and a notebook show of loaders, packers, data sets, columns and statistics."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import stoker
from stoker._format.display import describe_columns, html_table, text_table
from stoker_torch import Loader, LoaderStatistics, RaggedColumn
from support.datasets import SCHEMA, pack_numbers, sample_of


def test_columns_are_described_by_type_and_shape() -> None:
    assert describe_columns(SCHEMA) == "x: int64, image: uint8[4, 3], text: text, tokens: uint16[any]"
    many = {f"c{number}": stoker.Array("bool") for number in range(9)}
    assert describe_columns(many).endswith("c5: bool, and 3 more columns")


def test_a_table_is_aligned_and_its_html_is_escaped() -> None:
    rows = [("a", "1"), ("longer", "<b>&</b>")]
    assert text_table("title", rows) == "title\n  a       1\n  longer  <b>&</b>"
    page = html_table("<script>", rows)
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in page


def test_statistics_are_a_table_of_the_main_figures() -> None:
    with Loader(pack_numbers(500), batch_size=50, epochs=1) as loader:
        for _ in loader:
            pass
        statistics = loader.stats()
    text = str(statistics)
    assert len(text) < 1500
    for name in ("waited", "stall", "rate", "first batch", "GETs", "bytes read", "retries", "hedges", "dollars"):
        assert name in text
    assert text.startswith("10 batches, 500 samples\n")
    assert re.search(rf"^  GETs +{statistics.get_requests:,}$", text, re.MULTILINE)
    assert len(repr(statistics)) < 200
    assert "\n" not in repr(statistics)


def test_statistics_as_a_dictionary_have_everything_fit_for_json() -> None:
    with Loader(pack_numbers(500), batch_size=50, epochs=1, cache="memory:?limit=1MB") as loader:
        for _ in loader:
            pass
        statistics = loader.stats()
    found = json.loads(json.dumps(statistics.to_dict()))
    names = {each.name for each in fields(LoaderStatistics)} - {"lookups"} | {"look_ups"}
    assert found.keys() == names | {"stall", "samples_per_second"}
    assert (found["look_ups"], found["caches"]["memory"]["look_ups"]) == (
        statistics.lookups,
        statistics.caches["memory"].lookups,
    )
    assert found["waits"] == dict(statistics.waits)
    assert found["worst_waits"][0]["spans"][0]["phase"] in statistics.waits
    assert found["caches"]["memory"]["hits"] == statistics.caches["memory"].hits


def test_statistics_before_the_first_batch_are_a_table_too() -> None:
    with Loader(pack_numbers(10), batch_size=5) as loader:
        assert "none yet" in str(loader.stats())


def test_objects_tell_their_size_and_shape(tmp_path: Path) -> None:
    url = str(tmp_path / "<i>")
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=2000) as packer:
        assert "0 samples written" in repr(packer)
        packer.extend(map(sample_of, range(100)))
        assert "image: uint8[4, 3]" in repr(packer)
        assert "100 samples written" in repr(packer)
    assert "committed version 1 with 100 samples" in repr(packer)
    assert "not open" in repr(stoker.Packer(url, schema=SCHEMA))
    with Loader(url, batch_size=30, shuffle="none", columns=["image", "tokens"]) as loader, stoker.open(url) as dataset:
        batch = next(iter(loader))
        size = r"100 samples \(.*image: uint8\[4, 3\].*\) in \d+ super-samples, [\d.]+ KiB"
        assert re.search(rf"{size}; 4 batches of 30 an epoch; epoch 0, position 30>$", repr(loader))
        assert "text" not in repr(loader)
        assert re.search(rf"version 1: {size}>$", repr(dataset))
        shown = [packer, loader, dataset, loader.stats(), batch["tokens"]]
        for page in [each._repr_html_() for each in shown]:
            assert "<i>" not in page
            assert _Tags.of(page)["table"] == 1
    assert repr(batch["tokens"]) == "<RaggedColumn uint16[any]: 30 values of 0 to 6 elements, 85 in all, on cpu>"
    empty = RaggedColumn(stoker.Bytes(), torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    assert repr(empty) == "<RaggedColumn bytes: 0 values, 0 in all, on cpu>"


class _Tags(HTMLParser):
    """Counts elements, and checks that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.open: list[str] = []

    @classmethod
    def of(cls, page: str) -> dict[str, int]:
        parser = cls()
        parser.feed(page)
        assert not parser.open
        return parser.counts

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_first_batch_counts_from_the_first_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("stoker_torch._loader.time.perf_counter", lambda: now[0])
    url = pack_numbers(10)
    read_manifest = Loader._create_pipeline

    def slow(*arguments: object) -> object:
        now[0] += 3.0
        return read_manifest(*arguments)  # type: ignore[arg-type]  # what the loader gave

    monkeypatch.setattr(Loader, "_create_pipeline", slow)
    with Loader(url, batch_size=5) as loader:
        now[0] += 60.0  # the model is made meanwhile
        next(iter(loader))
        statistics = loader.stats()
    assert statistics.construction_seconds == 3.0
    assert statistics.first_batch_seconds == 0.0
