"""Output of commands with ``--json``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from stoker import cli
from stoker_sim import _experiments as experiments
from support.outside_names.shape import shape

__all__ = ["json_output"]

_SCENARIO = """
[dataset]
super_samples = 4
samples = 10
super_sample_bytes = "1MiB"
[node]
batch_size = 10
"""
_JOBS = """
[cluster]
cache_bytes = "150GB"
bandwidth = "80Mbit"
[[jobs]]
name = "fast"
dataset_bytes = "100GB"
compute = "100MB/s"
[[jobs]]
name = "named"
dataset = "images"
dataset_bytes = "100GB"
compute = "100MB/s"
"""
_FIGURES = ("--gpu-rate", "5000", "--first-byte", "50", "--bandwidth", "200MB", "--memory", "1GB")
_NAMES = ("columns", "name", "place")
"""Keys whose values are names, too, and do not depend on the machine."""
_NAMING = ("cost", "plan", "simulate")
_QUICK = ("deli-table-1",)
"""Experiments that are run because they take no time; of the others only the names are listed."""


def json_output(folder: Path) -> Iterator[str]:
    """Return the shape of each command's output for a data set with columns ``data`` and ``path``."""
    url = _packed(folder)
    yield from _written("pack", str(folder / "raw"), url, "--kind", "files", "--quiet", "--append")
    for command, *flags in (("info",), ("verify",), ("verify", "--deep"), ("plan", *_FIGURES)):
        yield from _written(command, url, *flags)
    yield from _written("doctor", url, "--write", code=None)  # which depends on the machine
    yield from _written("plan", url, *_FIGURES, "--price-of-hour", "2", "--loader-memory", "1KB")
    yield from _written("cost", url, "--store", "s3", "--epochs", "2", "--machine", "p5.48xlarge", "--wait-hours", "1")
    yield from _written("cost", url, "--store", "s3", "--compare-tiers", "--hours", "1")
    yield from _written("compact", url)
    objects = [file for file in (folder / "data").rglob("*") if file.is_file()]
    for file in objects:
        os.utime(file, (0, 0))  # garbage collection leaves young objects alone
    yield from _written("gc", url, "--keep-versions", "1")
    for file in objects:
        if file.parent.parent == folder / "data" / "data":
            file.write_bytes(b"")
    yield from _written("verify", url, code=1)
    yield from _written("allocate", str(_file(folder, "jobs.toml", _JOBS)))
    yield from _written("simulate", str(_file(folder, "scenario.toml", _SCENARIO)))
    for name in experiments.NAMES:
        yield f"stoker simulate {name}"
    for name in _QUICK:
        yield from _written("simulate", name, "--quick")


def _packed(folder: Path) -> str:
    (folder / "raw").mkdir()
    for number in range(4):
        (folder / "raw" / f"{number}.bin").write_bytes(bytes(100))
    url = str(folder / "data")
    first = ("pack", str(folder / "raw"), url, "--kind", "files", "--quiet", "--super-sample-bytes", "200")
    assert cli.main([*first]) == 0
    return url


def _file(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def _written(command: str, *arguments: str, code: int | None = 0) -> Iterator[str]:
    with redirect_stdout(StringIO()) as out:
        found = cli.main([command, *arguments, "--json"])
    assert code in (None, found)
    document = json.loads(out.getvalue())
    path = f"stoker {command} --json "
    if isinstance(document, dict) and "requests" in document:
        document["requests"] = {"OPERATION": next(iter(document["requests"].values()))}
    yield from shape(path, document)
    if command in _NAMING:
        yield from _named(path, document)


def _named(path: str, value: Any) -> Iterator[str]:
    """Return the values of keys that hold names."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key in _NAMES:
                yield from (f"{path}.{key} has {name!r}" for name in (each if isinstance(each, list) else [each]))
            yield from _named(f"{path}.{key}", each)
    elif isinstance(value, list):
        for each in value:
            yield from _named(f"{path}[]", each)
