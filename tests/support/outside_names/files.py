"""Files that users write: scenarios, jobs, prices; and documents of a loader: its state and its statistics."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stoker._cost.prices import CachePrices, DiskPrices, FunctionPrices, MachinePrices, PriceTier, StorePrices
from stoker_sim._commands.allocate import read_jobs
from stoker_sim._scenario_file import TomlSection, field_types, read_scenario
from stoker_torch import Loader, StreamDataset
from support.datasets import pack_numbers
from support.outside_names.shape import shape

__all__ = ["files", "loader_documents"]

_EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.toml"))
_EVERYTHING = """
[dataset]
super_samples = 20
samples = 10
super_sample_bytes = "1MiB"
[bucket]
first_byte.recorded = "seconds.json"
[node]
batch_size = 10
compute.seconds = 0.1
schedule = { kind = "fetch-size", fetch_size = 4, threshold = 2 }
caches = [{ limit_bytes = "10MiB" }]
[warm]
mean_life_seconds = 600
"""
_JOBS = """
[cluster]
cache_bytes = "150GB"
bandwidth = "80Mbit"
[[jobs]]
name = "bytes"
dataset = "images"
dataset_bytes = "100GB"
compute = "100MB/s"
[[jobs]]
name = "samples"
dataset_bytes = "100GB"
samples_per_second = 200
sample_bytes = "100KB"
"""


def files(folder: Path) -> Iterator[str]:
    """Return the fields that each kind of file may have."""
    (folder / "seconds.json").write_text("[0.1, 0.2]", encoding="utf-8")
    (folder / "all.toml").write_text(_EVERYTHING, encoding="utf-8")
    (folder / "jobs.toml").write_text(_JOBS, encoding="utf-8")
    (folder / "url.toml").write_text(_with_url(), encoding="utf-8")
    with _collect_fields("scenario file") as lines:
        for file in [*_EXAMPLES, folder / "all.toml", folder / "url.toml"]:
            read_scenario(file)
    yield from lines
    with _collect_fields("jobs file") as lines:
        read_jobs(folder / "jobs.toml", cache_bytes=None, bytes_per_second=None)
    yield from lines
    yield from _prices()


def _prices() -> Iterator[str]:
    """Return the fields of a price file: the permitted ones, and those of ours."""
    yield "price file overlay"
    kinds = {
        "stores": StorePrices,
        "functions": FunctionPrices,
        "machines": MachinePrices,
        "disks": DiskPrices,
        "caches": CachePrices,
    }
    for table, kind in kinds.items():
        yield from (f"price file {table}.* may have {field.name}" for field in fields(kind))
    yield from (f"price file functions.*.tiers[] may have {field.name}" for field in fields(PriceTier))
    for name, value in tomllib.loads(resources.files("stoker").joinpath("prices.toml").read_text("utf-8")).items():
        yield f"price file {name}"
        for entry in value.values() if name in kinds else ():
            yield from (f"price file {line.rpartition(':')[0]}" for line in shape(f"{name}.*", entry))


def _with_url() -> str:
    return f'[dataset]\nurl = "{pack_numbers(20)}"\nversion = 1\n[node]\nbatch_size = 10\n'


@contextmanager
def _collect_fields(what: str) -> Iterator[set[str]]:
    """Collect the fields that are read, whether they exist or not."""
    lines: set[str] = set()
    take, config, each, within = TomlSection._pop, TomlSection.create_config, TomlSection.sections, TomlSection.section
    contains = TomlSection.__contains__

    def note(section: TomlSection, name: str) -> None:
        lines.add(f"{what} {re.sub(r'[0-9]+(?=])', '', section._full_name(name))}")

    def noted_take(section: TomlSection, name: str, default: object) -> Any:
        note(section, name)
        return take(section, name, default)

    def noted_config(section: TomlSection, kind: type[Any], **given: Any) -> Any:
        for name, hint in field_types(kind).items():
            if hint in (int, float, bool) and name not in given:
                note(section, name)
        return config(section, kind, **given)

    def noted_each(section: TomlSection, name: str) -> list[TomlSection]:
        note(section, name)
        return each(section, name)

    def noted_within(section: TomlSection, name: str) -> TomlSection:
        note(section, name)
        return within(section, name)

    def noted_contains(section: TomlSection, name: str) -> bool:
        note(section, name)
        return contains(section, name)

    with (
        patch.object(TomlSection, "__contains__", noted_contains),
        patch.object(TomlSection, "_pop", noted_take),
        patch.object(TomlSection, "create_config", noted_config),
        patch.object(TomlSection, "sections", noted_each),
        patch.object(TomlSection, "section", noted_within),
    ):
        yield lines


def loader_documents(folder: Path) -> Iterator[str]:
    """Return the keys of states and of statistics, and the attributes of a loader."""
    with Loader(pack_numbers(40), batch_size=8, epochs=1, cache=f"disk:{folder}?limit=64MB") as loader:
        next(iter(loader))
        yield from shape("Loader.state_dict()", loader.state_dict())
        figures = shape("Loader.stats().to_dict()", loader.stats().to_dict())
        yield from (line.replace(str(folder), "FOLDER") for line in figures)
        yield from (f"Loader.{name}" for name in dir(loader) if not name.startswith("_"))
    stream = StreamDataset(pack_numbers(40), batch_size=8)
    yield from shape("StreamDataset.state_dict()", stream.state_dict())
    stream.close()
